/* A libcuda that checks what it is given by the rules of CUDA's driver API, notes it in $STUB_LOG, and runs nothing.
 *
 * Enough of the API for the launchers of Triton 3.6 to 3.9; it looks like an H100. A rule that is broken is an
 * error of the call, as with the driver, and a line of the log:
 *
 *     load NAME
 *     map SIZE SIZE STRIDE BOX BOX SWIZZLE         innermost first; the stride in bytes
 *     launch NAME GRID THREADS SHARED PARAMETER... as many as $STUB_PARAMETERS says, their first eight bytes
 *     broken WHAT
 */
#include "cuda.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOTHING(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

static FILE *notes(void) {
  static FILE *file;
  if (!file) file = fopen(getenv("STUB_LOG"), "a");
  setlinebuf(file);
  return file;
}

static CUresult broken(const char *what) {
  fprintf(notes(), "broken %s\n", what);
  return CUDA_ERROR_INVALID_VALUE;
}

NOTHING(cuInit, unsigned flags)
NOTHING(cuCtxSetCurrent, CUcontext context)
NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
NOTHING(cuModuleUnload, CUmodule module)
NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "see the log of the stub"; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)image; return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  fprintf(notes(), "load %s\n", name);
  *function = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

static unsigned bytes_of(CUtensorMapDataType type) {
  switch (type) {
  case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
  case CU_TENSOR_MAP_DATA_TYPE_UINT16:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
  case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
  case CU_TENSOR_MAP_DATA_TYPE_INT64:
  case CU_TENSOR_MAP_DATA_TYPE_UINT64:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
  default: return 4;
  }
}

/* The rules for maps without interleaving, in the order of the documentation of cuTensorMapEncodeTiled. */
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dims,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned bytes = bytes_of(type), widest = 256 * bytes;
  if ((uintptr_t)map % 64) return broken("map: not at a multiple of 64 bytes");
  if (rank < 1 || rank > 5) return broken("map: rank");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return broken("map: interleaved, whose rules are not here");
  if ((uintptr_t)address % 16) return broken("map: address not a multiple of 16");
  if (swizzle == CU_TENSOR_MAP_SWIZZLE_32B) widest = 32;
  if (swizzle == CU_TENSOR_MAP_SWIZZLE_64B) widest = 64;
  if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B) widest = 128;
  for (unsigned i = 0; i < rank; i++) {
    if (dims[i] < 1 || dims[i] > 1ull << 32) return broken("map: size of a dimension");
    if (box[i] < 1 || box[i] > 256) return broken("map: box of more than 256 elements");
    if (steps[i] < 1 || steps[i] > 8) return broken("map: element stride");
    if (i + 1 == rank) break;
    if (strides[i] % 16) return broken("map: stride not a multiple of 16");
    if (strides[i] >= 1ull << 40) return broken("map: stride of 2^40 or more");
    if (strides[i] < dims[i] * (i ? strides[i - 1] : bytes)) return broken("map: rows overlap");
  }
  if (box[0] * bytes % 16) return broken("map: inner box not a multiple of 16 bytes");
  if (box[0] * bytes > widest) return broken("map: inner box wider than the swizzle");
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && type < CU_TENSOR_MAP_DATA_TYPE_FLOAT16)
    return broken("map: integers filled with NaN");
  if (rank == 2)
    fprintf(notes(), "map %llu %llu %llu %u %u %d\n", (unsigned long long)dims[0], (unsigned long long)dims[1],
            (unsigned long long)strides[0], box[0], box[1], (int)swizzle);
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ) return broken("launch: empty grid");
  if (threads < 1 || threads > 1024) return broken("launch: threads of a block");
  if (config->sharedMemBytes > 232448) return broken("launch: shared memory");
  fprintf(notes(), "launch %s %u %u %u", (char *)function, config->gridDimX, threads, config->sharedMemBytes);
  const char *parameters = getenv("STUB_PARAMETERS");
  for (int i = 0; parameters && i < atoi(parameters); i++) {
    unsigned long long value;
    memcpy(&value, params[i], sizeof value);
    fprintf(notes(), " %llx", value);
  }
  fputc('\n', notes());
  return CUDA_SUCCESS;
}
