/* Written by anycell @anycell@. Arrays are float, one sample after the other. */
#ifndef MODEL_H
#define MODEL_H

#include <stddef.h>

#define MODEL_VERSION @version@ /* of these functions */
#define MODEL_INPUTS @inputs@
#define MODEL_OUTPUTS @outputs@
#define MODEL_STATE_SIZE @state_size@
#blob #define MODEL_WEIGHTS_SIZE @size@
#whole #define MODEL_MEMORY @memory@

#ifdef __cplusplus
extern "C" {
#endif

/* MODEL_VERSION of the library, to compare with this header's. */
int model_version(void);

/* Bytes of a state, which has MODEL_STATE_SIZE numbers. */
size_t model_state_size(void);

#blob /* Checks the contents of model.bin, at an address that 4 divides (64: faster), and enters it in a
#blob    state, before anything else. The weights must stay there. Returns 0, or what is wrong. */
#blob int model_load(float *state, const void *weights, size_t size);
#blob enum {
#blob     MODEL_MISALIGNED = 1, MODEL_TRUNCATED, MODEL_NO_WEIGHTS, MODEL_OTHER_VERSION, MODEL_OTHER_MODEL,
#blob     MODEL_DAMAGED
#blob };
#blob
/* Begins a sequence. */
void model_reset(float *state);

#step /* Runs one step, from MODEL_INPUTS to MODEL_OUTPUTS numbers; the arrays must not overlap. */
#step void model_step(float *state, const float *in, float *out);
#step
#step /* Runs many steps. */
#whole /* Runs a whole sequence, after a reset: layers run in reverse. Of the memory it takes
#whole    MODEL_MEMORY * steps numbers. */
void model_process(@process@);

#ifdef __cplusplus
}
#endif
#endif
