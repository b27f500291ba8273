/* A libcuda that notes what it is given in $STUB_LOG, and runs nothing.
 *
 * Enough of the API for the launchers of Triton 3.6 to 3.9; it looks like an H100. A launch that the driver
 * would refuse is an error, too, and "broken" in the log:
 *
 *     load NAME
 *     map SIZE SIZE STRIDE                         of matrices, innermost first; the stride in bytes
 *     launch NAME GRID THREADS SHARED PARAMETER... as many as $STUB_PARAMETERS says, their first eight bytes
 *     broken WHAT
 */
#include "cuda.h"
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

/* Triton's TensorDescriptor checks addresses, strides and sizes, the emulator of the tests boxes; the rest is
 * checked here, of bfloat16. */
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dims,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned widest = swizzle ? 16u << swizzle : 512; /* bytes */
  if (box[0] * 2 > widest) return broken("map: inner box wider than the swizzle");
  if (strides[0] < dims[0] * 2) return broken("map: rows overlap");
  fprintf(notes(), "map %llu %llu %llu\n", (unsigned long long)dims[0], (unsigned long long)dims[1],
          (unsigned long long)strides[0]);
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
