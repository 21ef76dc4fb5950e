/* Operators of PyTorch that run recurrent layers, by the interface in C that it keeps stable since 2.7.
   Written by anycell @anycell@. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN __attribute__((visibility("hidden"))) /* each library has its own */

typedef struct tensor *Tensor;
typedef int64_t Word;
int32_t aoti_torch_get_data_ptr(Tensor, void **), aoti_torch_get_dtype(Tensor, int32_t *);
int32_t aoti_torch_get_dim(Tensor, Word *), aoti_torch_get_sizes(Tensor, Word **);
int32_t aoti_torch_get_strides(Tensor, Word **), aoti_torch_delete_tensor_object(Tensor);
int32_t aoti_torch_empty_strided(Word axes, const Word *sizes, const Word *strides, int32_t dtype,
                                 int32_t device, int32_t index, Tensor *);
int32_t aoti_torch_library_init_fragment(const char *, const char *, uint32_t, void **);
int32_t aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, void **);
int32_t aoti_torch_library_def(void *, const char *);
int32_t aoti_torch_library_impl(void *, const char *, void (*)(uint64_t *, uint64_t, uint64_t));
void aoti_torch_check(bool, const char *, const char *, uint32_t, const char *);
int32_t aoti_torch_dtype_float32(void), aoti_torch_dtype_float64(void);
int32_t aoti_torch_dtype_uint8(void), aoti_torch_dtype_bool(void);

enum { STEPS = -1, ROWS = -2, AXES = 3, MOST = @most@, LINE = 64 };

/* A dense tensor: its sizes are numbers, or those of the first tensor. */
typedef struct { int32_t (*dtype)(void); Word axes, sizes[AXES]; } Form;

/* The entry ``place`` of the table with which a kernel is called: a number that depends on the sizes
   of the call, plus the address of tensor ``base``, or of the hyperparameters after the last one. */
typedef struct { Word place, base, fixed, by_row, by_step; } Entry;

/* Its tensors are the arguments, the results, and memory of the call, of which the last ones are
   the flags of each direction, if there are resets. */
typedef struct {
    const Form *forms;
    const Entry *entries;
    Word arguments, results, tensors, entry_count, scratch, scratch_bytes;
    Word packed, mask, resets, directions, reverse; /* numbers of tensors, or -1; a bit of each direction */
    const void *hyper;
    void (*needs)(Word *), (*door)(Word *);
} Layer;

static Word size_of(Word size, Word steps, Word rows) {
    return size == STEPS ? steps : size == ROWS ? rows : size;
}

static bool fits(Tensor tensor, const Form *form, Word steps, Word rows) {
    Word axes, *sizes, *strides, dense = 1;
    int32_t dtype;
    if (aoti_torch_get_dim(tensor, &axes) || aoti_torch_get_dtype(tensor, &dtype) ||
        aoti_torch_get_sizes(tensor, &sizes) || aoti_torch_get_strides(tensor, &strides) ||
        axes != form->axes || dtype != form->dtype())
        return false;
    for (Word i = axes; i--; dense *= sizes[i])
        if (sizes[i] != size_of(form->sizes[i], steps, rows) || (sizes[i] > 1 && strides[i] != dense))
            return false;
    return true;
}

static bool make(const Form *form, Word steps, Word rows, Tensor *tensor) {
    Word sizes[AXES], strides[AXES], dense = 1;
    for (Word i = form->axes; i--; dense *= sizes[i]) {
        sizes[i] = size_of(form->sizes[i], steps, rows);
        strides[i] = dense;
    }
    return !aoti_torch_empty_strided(form->axes, sizes, strides, form->dtype(), 0, 0, tensor);
}

/* Says before which steps a direction restores its states; nothing under the mask counts. */
static void restart(const char *resets, const char *mask, char *flags, Word steps, Word rows, bool reverse) {
    for (Word row = 0; row < rows; row++) {
        char next = 0;
        for (Word t = steps; t--;) {
            const Word at = t * rows + row;
            const bool step = !mask || mask[at];
            flags[at] = step && (reverse ? next : resets[at]);
            if (step) next = resets[at];
        }
    }
}

static uintptr_t aligned(const char *address) { return ((uintptr_t)address + LINE - 1) & -(uintptr_t)LINE; }

static const char *run(const Layer *layer, Tensor *tensors) {
    Word axes, *sizes, table[@words@] = {0};
    uintptr_t bases[MOST];
    if (aoti_torch_get_dim(tensors[0], &axes) || axes != 3 || aoti_torch_get_sizes(tensors[0], &sizes))
        return "its first tensor must have three axes: steps, rows, numbers";
    const Word steps = sizes[0], rows = sizes[1];
    for (Word i = 0; i < layer->tensors; i++) {
        if (i < layer->arguments ? !fits(tensors[i], &layer->forms[i], steps, rows)
                                 : !make(&layer->forms[i], steps, rows, &tensors[i]))
            return i < layer->arguments ? "a tensor does not fit; was the library made with this model?"
                                        : "no memory";
        aoti_torch_get_data_ptr(tensors[i], (void **)&bases[i]);
    }
    bases[layer->tensors] = (uintptr_t)layer->hyper;
    if (layer->resets >= 0)
        for (Word d = 0, first = layer->tensors - layer->directions; d < layer->directions; d++)
            restart((char *)bases[layer->resets], layer->mask < 0 ? 0 : (char *)bases[layer->mask],
                    (char *)bases[first + d], steps, rows, layer->reverse >> d & 1);
    uintptr_t *packed = &bases[layer->packed];
    const Word size = *packed % LINE ? layer->forms[layer->packed].sizes[0] : 0;
    char *copy = size ? malloc(size + LINE) : NULL;
    if (size && !copy) return "no memory";
    if (size) *packed = (uintptr_t)memcpy((char *)aligned(copy), (char *)*packed, size);
    for (Word i = 0; i < layer->entry_count; i++) {
        const Entry e = layer->entries[i];
        table[e.place] = e.fixed + e.by_row * rows + e.by_step * steps + (e.base < 0 ? 0 : (Word)bases[e.base]);
    }
    layer->needs(table);
    char *scratch = malloc(table[layer->scratch_bytes] + LINE);
    table[layer->scratch] = (Word)aligned(scratch);
    if (scratch) layer->door(table);
    free(scratch);
    free(copy);
    return scratch ? NULL : "no memory";
}

static void call(const Layer *layer, uint64_t *stack) {
    Tensor tensors[MOST] = {0};
    for (Word i = 0; i < layer->arguments; i++) tensors[i] = (Tensor)stack[i];
    const char *wrong = run(layer, tensors);
    for (Word i = 0; i < layer->tensors; i++) {
        const Word result = i - layer->arguments;
        if (!wrong && result >= 0 && result < layer->results)
            stack[result] = (uint64_t)tensors[i];
        else if (tensors[i])
            aoti_torch_delete_tensor_object(tensors[i]);
    }
    aoti_torch_check(!wrong, "@space@", __FILE__, __LINE__, wrong);
}

@layers@
__attribute__((constructor)) static void begin(void) {
    void *definitions, *kernels;
    aoti_torch_library_init_fragment("@space@", __FILE__, __LINE__, &definitions);
    aoti_torch_library_init_impl("@space@", "CPU", __FILE__, __LINE__, &kernels);
@begin@
}
