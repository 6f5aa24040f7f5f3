/* cuDNN: convolutions by its graph interface, and recurrent networks. Its other functions only
 * succeed (see build.py). */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include <stdlib.h>
#include <string.h>

static int new_object(void **to, size_t size) {
    enum { ALLOC_FAILED = 2 };
    *to = calloc(1, size);
    return *to ? SUCCESS : ALLOC_FAILED;
}

typedef struct {
    void *stream;
} Handle;

size_t cudnnGetVersion(void) {
    return 92400;
}

size_t cudnnGetCudartVersion(void) {
    return CUDA_VERSION;
}

int cudnnGetProperty(int which, int *value) {
    static const int version[] = {9, 24, 0};
    *value = version[which];
    return SUCCESS;
}

const char *cudnnGetErrorString(int status) {
    return status ? "CUDNN_STATUS_ERROR" : "CUDNN_STATUS_SUCCESS";
}

void cudnnGetLastErrorString(char *to, size_t size) {
    if (size) *to = 0;
}

int cudnnCreate(Handle **handle) {
    take_library_memory(CUDNN, settings()->cudnn);
    return new_object((void **)handle, sizeof **handle);
}

int cudnnSetStream(Handle *handle, void *stream) {
    handle->stream = stream;
    return SUCCESS;
}

int cudnnGetStream(Handle *handle, void **stream) {
    *stream = handle->stream;
    return SUCCESS;
}

/* The graph interface: any operation has one engine, without knobs. */

enum { /* cudnnBackendAttributeName_t and cudnnBackendAttributeType_t */
    KNOB_CHOICES = 302,
    PLAN_WORKSPACE = 402,
    NUMERICAL_NOTES = 1303,
    BEHAVIOR_NOTES = 1305,
    TYPE_INT64 = 3,
};
enum { DESCRIPTOR_SIZE = 256 };

int cudnnBackendCreateDescriptor(int type, void **to) {
    return new_object(to, DESCRIPTOR_SIZE);
}

int cudnnBackendDestroyDescriptor(void *descriptor) {
    free(descriptor);
    return SUCCESS;
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *to) {
    bool is_empty = name == KNOB_CHOICES || name == NUMERICAL_NOTES || name == BEHAVIOR_NOTES;
    if (count) *count = is_empty ? 0 : 1;
    if (is_empty || !to || room < 1 || type != TYPE_INT64) return SUCCESS;
    *(int64_t *)to = name == PLAN_WORKSPACE ? settings()->cudnn_workspace : 0;
    return SUCCESS;
}

int cudnnBackendExecute(Handle *handle, void *plan, void *tensors) {
    static const double MICROSECONDS = 20;
    spend(handle->stream, MICROSECONDS);
    return SUCCESS;
}

/* Descriptors of the older interface */

typedef struct {
    int type, rank;
    int sizes[8], strides[8];
} Tensor;

int cudnnCreateTensorDescriptor(void **to) {
    return new_object(to, sizeof(Tensor));
}

int cudnnDestroyTensorDescriptor(void *tensor) {
    free(tensor);
    return SUCCESS;
}

int cudnnCreateFilterDescriptor(void **to) {
    return new_object(to, sizeof(Tensor));
}

int cudnnDestroyFilterDescriptor(void *filter) {
    free(filter);
    return SUCCESS;
}

int cudnnSetTensorNdDescriptor(Tensor *tensor, int type, int rank, const int *sizes, const int *strides) {
    tensor->type = type;
    tensor->rank = rank;
    for (int i = 0; i < rank && i < 8; i++) {
        tensor->sizes[i] = sizes[i];
        tensor->strides[i] = strides[i];
    }
    return SUCCESS;
}

int cudnnGetTensorNdDescriptor(const Tensor *tensor, int room, int *type, int *rank, int *sizes, int *strides) {
    *type = tensor->type;
    *rank = tensor->rank;
    for (int i = 0; i < tensor->rank && i < room; i++) {
        sizes[i] = tensor->sizes[i];
        strides[i] = tensor->strides[i];
    }
    return SUCCESS;
}

#define DESCRIPTOR(Name)                                  \
    int cudnnCreate##Name##Descriptor(void **to) {        \
        return new_object(to, DESCRIPTOR_SIZE);           \
    }                                                     \
    int cudnnDestroy##Name##Descriptor(void *descriptor) { \
        free(descriptor);                                 \
        return SUCCESS;                                   \
    }

DESCRIPTOR(Activation)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(Convolution)
DESCRIPTOR(Dropout)
DESCRIPTOR(Pooling)
DESCRIPTOR(RNNData)
DESCRIPTOR(RNN)
DESCRIPTOR(SpatialTransformer)

/* Sizes of workspaces: they are cuDNN's own choice, and these are made up. */

int cudnnDropoutGetStatesSize(Handle *handle, size_t *size) {
    static const size_t THREADS_OF_PROCESSOR = 2048;
    static const size_t STATE_SIZE = 16;
    *size = (size_t)settings()->processors * THREADS_OF_PROCESSOR * STATE_SIZE;
    return SUCCESS;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Handle *handle, int mode, int operation, void *x,
                                                             void *z, void *y, void *parameters,
                                                             void *activation, size_t *size) {
    *size = 0;
    return SUCCESS;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(Handle *handle, int mode, int operation, void *x, void *y,
                                                      void *dy, void *dz, void *dx, void *parameters,
                                                      void *activation, size_t *size) {
    *size = 0;
    return SUCCESS;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle *handle, int mode, int operation,
                                                         void *activation, void *x, size_t *size) {
    *size = 0;
    return SUCCESS;
}

int cudnnGetCTCLossWorkspaceSize(Handle *handle, void *probabilities, void *gradients, const int *labels,
                                 const int *label_lengths, const int *input_lengths, int algorithm,
                                 void *descriptor, size_t *size) {
    *size = MIB;
    return SUCCESS;
}

int cudnnGetCTCLossWorkspaceSize_v8(Handle *handle, int algorithm, void *descriptor, void *probabilities,
                                    void *gradients, size_t *size) {
    *size = MIB;
    return SUCCESS;
}

/* Recurrent networks. Their weights lie in one space: the matrices of each layer and direction (for
 * each gate one of the input, then for each gate one of the state, then the projection's), and behind
 * all of them the biases. */

typedef struct {
    int mode, bidirectional, type;
    int input, hidden, projection, layers;
} Rnn;

typedef struct {
    int type, steps, batch, width;
} Sequences;

enum { LSTM = 2, GRU = 3 };

static int64_t type_size(int type) {
    enum { FLOAT = 0, DOUBLE = 1 };
    return type == FLOAT ? 4 : type == DOUBLE ? 8 : 2;
}

static int64_t gates_of(const Rnn *rnn) {
    return rnn->mode == LSTM ? 4 : rnn->mode == GRU ? 3 : 1;
}

static int directions_of(const Rnn *rnn) {
    return 1 + rnn->bidirectional;
}

static int64_t output_width(const Rnn *rnn) {
    return rnn->projection > 0 ? rnn->projection : rnn->hidden;
}

/* A "layer" of these functions is a layer in one direction, as cuDNN counts them. */
static int layers_of(const Rnn *rnn) {
    return rnn->layers * directions_of(rnn);
}

static int64_t input_width(const Rnn *rnn, int layer) {
    bool is_first = layer < directions_of(rnn);
    return is_first ? rnn->input : output_width(rnn) * directions_of(rnn);
}

static int64_t matrix_count(const Rnn *rnn, int layer) {
    int64_t count = gates_of(rnn) * rnn->hidden * (input_width(rnn, layer) + output_width(rnn));
    if (output_width(rnn) != rnn->hidden) count += output_width(rnn) * rnn->hidden;
    return count;
}

static int64_t matrix_counts(const Rnn *rnn, int layers) {
    int64_t count = 0;
    for (int layer = 0; layer < layers; layer++) count += matrix_count(rnn, layer);
    return count;
}

int cudnnSetRNNDescriptor_v8(Rnn *rnn, int algorithm, int mode, int bias_mode, int direction, int input_mode,
                             int type, int precision, int math, int input, int hidden, int projection,
                             int layers, void *dropout, unsigned flags) {
    *rnn = (Rnn){mode, direction, type, input, hidden, projection, layers};
    return SUCCESS;
}

int cudnnSetRNNDataDescriptor(Sequences *sequences, int type, int layout, int steps, int batch, int width,
                              const int *lengths, void *fill) {
    *sequences = (Sequences){type, steps, batch, width};
    return SUCCESS;
}

int cudnnGetRNNWeightSpaceSize(Handle *handle, const Rnn *rnn, size_t *size) {
    int64_t biases = 2 * gates_of(rnn) * rnn->hidden * layers_of(rnn);
    *size = (size_t)((matrix_counts(rnn, layers_of(rnn)) + biases) * type_size(rnn->type));
    return SUCCESS;
}

static void describe(Tensor *tensor, int type, int64_t rows, int64_t columns) {
    if (!tensor) return; /* not asked for */
    *tensor = (Tensor){
        .type = type,
        .rank = 3,
        .sizes = {1, (int)rows, (int)columns},
        .strides = {(int)(rows * columns), (int)columns, 1},
    };
}

/* Where a layer's matrix and bias lie, which `id` counts as said above. */
int cudnnGetRNNWeightParams(Handle *handle, const Rnn *rnn, int layer, size_t size, char *space, int id,
                            Tensor *matrix, char **matrix_at, Tensor *bias, char **bias_at) {
    int64_t gates = gates_of(rnn);
    int64_t input = gates * rnn->hidden * input_width(rnn, layer);
    int64_t state = gates * rnn->hidden * output_width(rnn);
    int64_t offset = matrix_counts(rnn, layer);
    if (id < gates) {
        offset += id * rnn->hidden * input_width(rnn, layer);
        describe(matrix, rnn->type, rnn->hidden, input_width(rnn, layer));
    } else if (id < 2 * gates) {
        offset += input + (id - gates) * rnn->hidden * output_width(rnn);
        describe(matrix, rnn->type, rnn->hidden, output_width(rnn));
    } else {
        offset += input + state;
        describe(matrix, rnn->type, output_width(rnn), rnn->hidden);
    }
    if (matrix_at) *matrix_at = space + offset * type_size(rnn->type);
    int64_t bias_offset = matrix_counts(rnn, layers_of(rnn)) + (layer * 2 * gates + id) * rnn->hidden;
    describe(bias, rnn->type, rnn->hidden, 1);
    if (bias_at) *bias_at = id < 2 * gates ? space + bias_offset * type_size(rnn->type) : NULL;
    return SUCCESS;
}

/* Made up too: the gates' values, and for training those of each layer with its states. */
int cudnnGetRNNTempSpaceSizes(Handle *handle, const Rnn *rnn, int is_training, const Sequences *inputs,
                              size_t *workspace, size_t *reserve) {
    int64_t states = (int64_t)inputs->steps * inputs->batch * rnn->hidden * directions_of(rnn);
    int64_t bytes = states * type_size(rnn->type);
    if (workspace) *workspace = (size_t)(bytes * gates_of(rnn));
    if (reserve) *reserve = is_training ? (size_t)(bytes * rnn->layers * (gates_of(rnn) + 2)) : 0;
    return SUCCESS;
}

static int run(Handle *handle, const Rnn *rnn, const Sequences *sequences) {
    double products = (double)matrix_counts(rnn, layers_of(rnn));
    spend_flops(handle->stream, 2 * products * sequences->steps * sequences->batch);
    return SUCCESS;
}

int cudnnRNNForward(Handle *handle, const Rnn *rnn, int mode, const int *lengths, const Sequences *inputs) {
    return run(handle, rnn, inputs);
}

int cudnnRNNBackwardData_v8(Handle *handle, const Rnn *rnn, const int *lengths, const Sequences *outputs) {
    return run(handle, rnn, outputs);
}

int cudnnRNNBackwardWeights_v8(Handle *handle, const Rnn *rnn, int mode, const int *lengths,
                               const Sequences *inputs) {
    return run(handle, rnn, inputs);
}
