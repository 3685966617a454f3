/* Learns from every byte of the console and logs every 256 bytes how well it predicted them.
 * The files of the learner come from `python ../prepare.py esp-idf`. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "esp_log.h"
#include "freertos/FreeRTOS.h"
#include "freertos/task.h"

#include "model.h"
#include "model_weights.h"

static const char *const TAG = "learner";
static struct model_learner learner;

void app_main(void) {
    float nats_of_block = 0.0f;
    uint32_t bytes_read = 0;
    if (model_init(&learner, model_weights, sizeof model_weights) != MODEL_OK) {
        ESP_LOGE(TAG, "the weights do not belong to the learner");
        return;
    }
    ESP_LOGI(TAG, "ready, %u bytes of RAM", (unsigned)sizeof learner);
    for (;;) {
        const int byte = getchar();
        float nats = 0.0f;
        if (byte == EOF) { /* nothing has arrived */
            vTaskDelay(1);
            continue;
        }
        if (model_learn(&learner, byte, &nats) != MODEL_OK) continue; /* a NaN or infinite loss: the byte was left out */
        nats_of_block += nats;
        if (++bytes_read % 256 == 0) {
            ESP_LOGI(TAG, "%" PRIu32 " bytes, %.3f bits per byte", bytes_read, (double)(nats_of_block / 256.0f / 0.693147f));
            nats_of_block = 0.0f;
        }
    }
}
