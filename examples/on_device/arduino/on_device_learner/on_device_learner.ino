// Learns from every byte that arrives on the serial port, and says every 256 bytes how well it predicted them.
// The files of the learner come from `python ../prepare.py arduino`.

#include <math.h>

extern "C" {
#include "model.h"
}
#include "model_weights.h"

static struct model_learner learner;
static float nats_of_block = 0.0f;
static unsigned long bytes_read = 0;

void setup() {
  Serial.begin(115200);
  while (!Serial) {
  }
  if (model_init(&learner, model_weights, sizeof model_weights) != MODEL_OK) {
    Serial.println("the weights do not belong to the learner");
    while (true) {
    }
  }
  Serial.print("learner ready, bytes of RAM: ");
  Serial.println((unsigned long)sizeof learner);
}

void loop() {
  if (Serial.available() <= 0) return;
  float nats = 0.0f;
  const int outcome = model_learn(&learner, Serial.read(), &nats);
  if (outcome != MODEL_OK) return;  // a NaN or infinite loss: the byte was left out
  nats_of_block += nats;
  if (++bytes_read % 256 == 0) {
    Serial.print(bytes_read);
    Serial.print(" bytes, bits per byte: ");
    Serial.println(nats_of_block / 256.0f / (float)M_LN2, 3);
    nats_of_block = 0.0f;
  }
}
