/* What the files of the runtime and the driver share. */
#ifndef RUNTIME_H
#define RUNTIME_H
#include "cuda_types.h"
#include <stdbool.h>

#define DEVICE_NAME "Emulated GPU"
enum { FIRST_PCI_BUS = 0x17, CLOCK_MHZ = 1410 };

#pragma GCC visibility push(hidden)
Error fail(Error error); /* remember it for cudaGetLastError, and return it */

/* Return from the function if a call fails. */
#define TRY(call)                        \
    do {                                 \
        Error error_ = (Error)(call);    \
        if (error_) return fail(error_); \
    } while (0)

bool device_has_context(int device);
void set_current_device(int device);
#pragma GCC visibility pop

/* The kind of a copy follows from its addresses. */
Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);
Error cudaMemsetAsync(void *to, int value, size_t size, void *stream);
Error cudaDeviceGetAttribute(int *value, int attribute, int device);
const char *cudaGetErrorString(Error error);
#endif
