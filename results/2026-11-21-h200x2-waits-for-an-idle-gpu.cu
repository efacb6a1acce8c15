// Which CUDA calls wait while a kernel spins on this or another GPU? Needs two GPUs that reach each other.
//   nvcc -arch=sm_90a -cubin -o kernels.cubin FILE.cu && nvcc -o waits FILE.cu -lcuda && ./waits kernels.cubin
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <thread>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
using namespace std::chrono;
extern "C" __global__ void spin(volatile int* flag, long long limit) {
  long long a, b; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(a));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(b)); } while (*flag == 0 && b - a < limit);
}
extern "C" __global__ void nop(int* p) { p[threadIdx.x] = 1; }
extern "C" __global__ void nop2(int* p) { p[threadIdx.x] = 2; }
#define CK(x) do { CUresult r = (x); if (r) { const char* s; cuGetErrorString(r, &s); printf("FAILED %s: %s\n", #x, s); exit(1);} } while (0)
static std::vector<char> cubin(const char* f) { FILE* h = fopen(f, "rb"); std::vector<char> v; int c; while ((c = fgetc(h)) != EOF) v.push_back(c); v.push_back(0); fclose(h); return v; }
CUcontext ctx[2]; CUfunction spinner[2]; CUstream st[2], other[2]; volatile int* flag; CUdeviceptr dflag[2];
void test(const char* name, int on, std::function<void()> fn) {
  *flag = 0; CK(cuCtxSetCurrent(ctx[on]));
  long long limit = 3000000000LL; void* args[] = {&dflag[on], &limit};
  CK(cuLaunchKernel(spinner[on], 1, 1, 1, 32, 1, 1, 0, st[on], args, 0));
  std::this_thread::sleep_for(milliseconds(20));
  std::atomic<bool> done{false}; auto t0 = steady_clock::now(); std::atomic<double> took{0};
  std::thread w([&] { fn(); took = duration<double, std::milli>(steady_clock::now() - t0).count(); done = true; });
  while (!done && duration<double>(steady_clock::now() - t0).count() < 1.0) std::this_thread::sleep_for(milliseconds(2));
  bool waits = !done; *flag = 1; w.join();
  CK(cuCtxSetCurrent(ctx[0])); CK(cuCtxSynchronize()); CK(cuCtxSetCurrent(ctx[1])); CK(cuCtxSynchronize());
  printf("%-58s spinning GPU %d: %s %.2f ms\n", name, on, waits ? "WAITS" : "goes on", took.load()); fflush(stdout);
}
int main(int, char** argv) {
  CK(cuInit(0));
  for (int d = 0; d < 2; d++) { CUdevice dev; CK(cuDeviceGet(&dev, d)); CK(cuDevicePrimaryCtxRetain(&ctx[d], dev)); }
  void* h; CK(cuCtxSetCurrent(ctx[0])); CK(cuMemHostAlloc(&h, 64, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)); flag = (int*)h; *flag = 1;
  auto bin = cubin(argv[1]);
  for (int d = 0; d < 2; d++) { CK(cuCtxSetCurrent(ctx[d])); CK(cuCtxEnablePeerAccess(ctx[1 - d], 0)); CK(cuMemHostGetDevicePointer(&dflag[d], h, 0));
    CUmodule m; CK(cuModuleLoadData(&m, bin.data())); CK(cuModuleGetFunction(&spinner[d], m, "spin")); CK(cuStreamCreate(&st[d], CU_STREAM_NON_BLOCKING)); CK(cuStreamCreate(&other[d], CU_STREAM_NON_BLOCKING));
    long long limit = 1; void* args[] = {&dflag[d], &limit}; CK(cuLaunchKernel(spinner[d], 1, 1, 1, 32, 1, 1, 0, st[d], args, 0)); CK(cuStreamSynchronize(st[d])); }
  for (int where = 0; where < 2; where++) for (int round = 0; round < 2; round++) {  // the work is on GPU 1, the spinning on 1 or 0
    int on = where; auto use = [] { CK(cuCtxSetCurrent(ctx[1])); };
    CUmodule m; CUfunction f, f2; CUdeviceptr p, q; CUgraph g; CUgraphExec ge; CUevent ev;
    auto run = [&](CUfunction f) { void* a[] = {&q}; CK(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, other[1], a, 0)); };
    use(); CK(cuMemAlloc(&q, 1 << 20)); CK(cuEventCreate(&ev, 0));
    test("cuModuleLoadData", on, [&] { use(); CK(cuModuleLoadData(&m, bin.data())); });
    test("cuModuleGetFunction", on, [&] { use(); CK(cuModuleGetFunction(&f, m, "nop")); });
    test("cuFuncSetAttribute (dynamic smem)", on, [&] { use(); CK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100000)); });
    test("cuFuncLoad", on, [&] { use(); CK(cuFuncLoad(f)); });
    test("first launch", on, [&] { use(); run(f); });
    test("launch and wait for its stream", on, [&] { use(); run(f); CK(cuStreamSynchronize(other[1])); });
    test("get another function, first launch", on, [&] { use(); CK(cuModuleGetFunction(&f2, m, "nop2")); run(f2); });
    test("graph: capture, instantiate", on, [&] { use(); CK(cuStreamBeginCapture(other[1], CU_STREAM_CAPTURE_MODE_RELAXED)); for (int i = 0; i < 16; i++) run(f); CK(cuStreamEndCapture(other[1], &g)); CK(cuGraphInstantiate(&ge, g, 0)); });
    test("graph: upload", on, [&] { use(); CK(cuGraphUpload(ge, other[1])); });
    test("graph: launch, wait", on, [&] { use(); CK(cuGraphLaunch(ge, other[1])); CK(cuStreamSynchronize(other[1])); });
    test("graph: destroy", on, [&] { use(); CK(cuGraphExecDestroy(ge)); });
    test("cuMemAlloc 64 MiB", on, [&] { use(); CK(cuMemAlloc(&p, 64 << 20)); });
    test("cuMemcpyHtoDAsync pageable", on, [&] { use(); static char b[4096]; CK(cuMemcpyHtoDAsync(q, b, 4096, other[1])); });
    test("cuMemFree", on, [&] { use(); CK(cuMemFree(p)); });
    test("cuStreamCreate", on, [&] { use(); CUstream s; CK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING)); });
    test("cuMemHostAlloc", on, [&] { use(); void* b; CK(cuMemHostAlloc(&b, 1 << 20, CU_MEMHOSTALLOC_PORTABLE)); });
    test("cuModuleUnload", on, [&] { use(); CK(cuModuleUnload(m)); });
  }
}
