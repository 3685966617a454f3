/* One learner in static memory, and its functions as the page calls them. */
#include "model.h"

#define EXPORTED(name) __attribute__((export_name(#name))) name

static struct model_learner learner;
static unsigned char weights[MODEL_WEIGHTS_FILE_SIZE], saved[MODEL_SAVED_SIZE];
static float nats, logits[MODEL_VOCAB_SIZE];

unsigned char *EXPORTED(weights_address)(void);
unsigned char *EXPORTED(saved_address)(void);
float *EXPORTED(nats_address)(void);
float *EXPORTED(logits_address)(void);
int EXPORTED(weights_size)(void);
int EXPORTED(saved_size)(void);
int EXPORTED(memory_size)(void);
int EXPORTED(begin)(void);
int EXPORTED(learn)(int byte);
int EXPORTED(predict)(void);
void EXPORTED(save)(void);
int EXPORTED(load)(void);

unsigned char *weights_address(void) { return weights; }
unsigned char *saved_address(void) { return saved; }
float *nats_address(void) { return &nats; }
float *logits_address(void) { return logits; }
int weights_size(void) { return (int)sizeof weights; }
int saved_size(void) { return (int)sizeof saved; }
int memory_size(void) { return (int)sizeof learner; }

int begin(void) { return model_init(&learner, weights, sizeof weights); }
int learn(int byte) { return model_learn(&learner, byte, &nats); }
int predict(void) { return model_predict(&learner, logits); }
void save(void) { model_save(&learner, saved); }
int load(void) { return model_load(&learner, saved, sizeof saved); }
