/* Written by anycell @anycell@. Arrays are float, one sample after the other. */
#ifndef MODEL_H
#define MODEL_H

#include <stddef.h>

#define MODEL_VERSION @version@ /* of these functions */
#define MODEL_INPUTS @inputs@
#define MODEL_OUTPUTS @outputs@
#define MODEL_STATE_SIZE @state_size@
#whole #define MODEL_MEMORY @memory@

#ifdef __cplusplus
extern "C" {
#endif

/* MODEL_VERSION of the library, to compare with this header's. */
int model_version(void);

/* Bytes of a state, which has MODEL_STATE_SIZE numbers. */
size_t model_state_size(void);

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
