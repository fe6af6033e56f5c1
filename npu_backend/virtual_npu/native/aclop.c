/* The old operator interface (aclop), which torch_npu uses where its C++ calls an operator past torch's dispatcher.
 *
 * Tensors arrive as descriptions and buffers. `operators` lists what is implemented; any other fails by its name.
 * Attributes are accepted and not kept: no operator of the list has one.
 */
#include "cann.h"

#include <stdlib.h>
#include <string.h>

#ifndef VIRTUAL_NPU_CHECK_PROTOTYPES
typedef struct aclTensorDesc aclTensorDesc;
typedef struct aclDataBuffer aclDataBuffer;
typedef struct aclopAttr aclopAttr;
typedef int aclDataType, aclFormat, aclMemType, aclopEngineType, aclopCompileType;
#endif

struct aclTensorDesc {
    aclDataType type;
    aclFormat format;
    int dimensions;
    int64_t sizes[16];
};
struct aclDataBuffer {
    char *data;
    size_t size; /* bytes */
};
struct aclopAttr {
    char unused;
};

enum { MOST_DIMENSIONS = 16 };

/* ---- descriptions and buffers ---- */

aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *sizes, aclFormat format) {
    aclTensorDesc *description = dimensions <= MOST_DIMENSIONS ? calloc(1, sizeof *description) : NULL;
    if (!description) return NULL;
    *description = (aclTensorDesc){.type = type, .format = format, .dimensions = dimensions};
    if (dimensions > 0) memcpy(description->sizes, sizes, (size_t)dimensions * sizeof *sizes);
    return description;
}
void aclDestroyTensorDesc(const aclTensorDesc *description) { free((void *)description); }
aclDataType aclGetTensorDescType(const aclTensorDesc *description) { return description->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc *description) { return description->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc *description) { return (size_t)description->dimensions; }
aclError aclGetTensorDescDimV2(const aclTensorDesc *description, size_t index, int64_t *size) {
    if (index >= (size_t)description->dimensions) return VNPU_INVALID_PARAM;
    *size = description->sizes[index];
    return VNPU_OK;
}
/* Storage is plain, whatever format and place are asked for. */
aclError aclSetTensorFormat(aclTensorDesc *description, aclFormat format) { return VNPU_OK; }
aclError aclSetTensorShape(aclTensorDesc *description, int dimensions, const int64_t *sizes) { return VNPU_OK; }
aclError aclSetTensorPlaceMent(aclTensorDesc *description, aclMemType place) { return VNPU_OK; }
void aclSetTensorDescName(aclTensorDesc *description, const char *name) {}

aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
    aclDataBuffer *buffer = malloc(sizeof *buffer);
    if (buffer) *buffer = (aclDataBuffer){data, size};
    return buffer;
}
aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    free((void *)buffer);
    return VNPU_OK;
}

/* ---- attributes ---- */

aclopAttr *aclopCreateAttr(void) { return calloc(1, sizeof(aclopAttr)); }
void aclopDestroyAttr(const aclopAttr *attributes) { free((void *)attributes); }
aclError aclopSetAttrBool(aclopAttr *attributes, const char *name, uint8_t value) { return VNPU_OK; }
aclError aclopSetAttrInt(aclopAttr *attributes, const char *name, int64_t value) { return VNPU_OK; }
aclError aclopSetAttrFloat(aclopAttr *attributes, const char *name, float value) { return VNPU_OK; }
aclError aclopSetAttrString(aclopAttr *attributes, const char *name, const char *value) { return VNPU_OK; }
aclError aclopSetAttrDataType(aclopAttr *attributes, const char *name, aclDataType value) { return VNPU_OK; }
aclError aclopSetAttrListBool(aclopAttr *attributes, const char *name, int count,
                              const uint8_t *values) { return VNPU_OK; }
aclError aclopSetAttrListInt(aclopAttr *attributes, const char *name, int count,
                             const int64_t *values) { return VNPU_OK; }
aclError aclopSetAttrListFloat(aclopAttr *attributes, const char *name, int count,
                               const float *values) { return VNPU_OK; }
aclError aclopSetAttrListListInt(aclopAttr *attributes, const char *name, int count, const int *lengths,
                                 const int64_t *const values[]) {
    return VNPU_OK;
}

/* ---- operators ---- */

typedef struct {
    const aclTensorDesc *const *input_descriptions, *const *output_descriptions;
    const aclDataBuffer *const *inputs;
    aclDataBuffer *const *outputs;
} Operands;

/* Inputs: sizes (not needed), and one element, which every element of the output becomes. all_gather clears so. */
static aclError fill(const Operands *operands) {
    const aclDataBuffer *value = operands->inputs[1], *output = operands->outputs[0];
    if (!value->size || output->size % value->size)
        return vnpu_error(VNPU_INVALID_PARAM, "Fill: %zu bytes of %zu each", output->size, value->size);
    for (size_t i = 0; i < output->size; i += value->size) memcpy(output->data + i, value->data, value->size);
    return VNPU_OK;
}

/* Inputs: the tensor, how much is added before and after each dimension (int32 or int64), and one element to add.
 * all_gather pads to whole blocks of 32 bytes so. */
static aclError pad(const Operands *operands) {
    const aclTensorDesc *from = operands->input_descriptions[0], *to = operands->output_descriptions[0];
    const aclDataBuffer *input = operands->inputs[0], *paddings = operands->inputs[1], *value = operands->inputs[2],
        *output = operands->outputs[0];
    int last = from->dimensions - 1;
    if (last < 0 || to->dimensions != from->dimensions || !value->size) return vnpu_error(VNPU_INVALID_PARAM,
        "PadV3: operands that do not fit");
    aclError error = fill(&(Operands){.inputs = operands->inputs + 1, .outputs = operands->outputs});
    bool wide = paddings->size == (size_t)(last + 1) * 2 * sizeof(int64_t);
    size_t row = (size_t)from->sizes[last] * value->size;
    for (size_t start = 0; !error && start + row <= input->size && row; start += row) {
        int64_t index = (int64_t)(start / row), place = 0, stride = 1; /* of the row in the input, and where it goes */
        for (int i = last; i >= 0; i--) {
            int64_t before = wide ? ((int64_t *)paddings->data)[2 * i] : ((int32_t *)paddings->data)[2 * i];
            int64_t position = i == last ? 0 : index % from->sizes[i];
            if (i != last) index /= from->sizes[i];
            place += (position + before) * stride;
            stride *= to->sizes[i];
        }
        size_t target = (size_t)place * value->size;
        if (place < 0 || target + row > output->size) return vnpu_error(VNPU_INVALID_PARAM,
            "PadV3: a row does not fit");
        memcpy(output->data + target, input->data + start, row);
    }
    return error;
}

static const struct {
    const char *name;
    int inputs, outputs;
    aclError (*run)(const Operands *operands);
} operators[] = {{"Fill", 2, 1, fill}, {"PadV3", 3, 1, pad}};

aclError aclopCompileAndExecute(const char *name, int inputs, const aclTensorDesc *const input_descriptions[],
                                const aclDataBuffer *const input[],
                                int outputs, const aclTensorDesc *const output_descriptions[],
                                    aclDataBuffer *const output[],
                                const aclopAttr *attributes, aclopEngineType engine, aclopCompileType compile,
                                    const char *path,
                                aclrtStream stream) {
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if (!strcmp(operators[i].name, name) && operators[i].inputs == inputs && operators[i].outputs == outputs)
            return operators[i].run(&(Operands){input_descriptions, output_descriptions, input, output});
    return vnpu_error(VNPU_NOT_SUPPORTED, "torch_npu called operator %s past torch's dispatcher, "
                      "and aclop.c does not have it", name);
}
