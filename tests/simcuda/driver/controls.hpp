// What tests ask of the simulated driver beside the driver's own interface.
//
// Owns the prototypes of the functions simcuda_*. They need no context and are never refused.
#ifndef SIMCUDA_DRIVER_CONTROLS_HPP_
#define SIMCUDA_DRIVER_CONTROLS_HPP_

#include "../cuda_types.hpp"

extern "C" {

struct simcuda_counters {
  uint64_t d2h_bytes;  // given to copies, counted at the call
  uint64_t h2d_bytes;
  uint64_t d2d_bytes;
  uint64_t pageable_copies;  // asynchronous ones from or to host memory that is not registered
  uint64_t host_synchronizations;
  uint64_t device_allocations_live;
  uint64_t registered_bytes_live;
  uint64_t streams_live;
  uint64_t events_live;
  uint64_t violations;
};

SIMCUDA_API void simcuda_get_counters(simcuda_counters* counters);
// Those of live things stay.
SIMCUDA_API void simcuda_reset_counters();
// "": there was none. Stays valid for the life of the process.
SIMCUDA_API const char* simcuda_last_violation();
// The n-th call of a function from now, 1: the next one, gives `code` and does nothing else.
SIMCUDA_API void simcuda_fail(const char* function, int nth_from_now, int code);
// Of every `every` calls of a function from now, that at `at`, from 0, is as if the program had
// left it out: cuStreamWaitEvent and cuStreamWaitValue32 wait for nothing, cuStreamWriteValue32
// writes at once and not in the order of its stream. Several rules add up; every 0 forgets them.
SIMCUDA_API void simcuda_leave_out(const char* function, int every, int at);
// Forgets errors that stick to contexts and failures that have not come, as a new process would.
SIMCUDA_API void simcuda_recover();
// Begins the sequence of random delays anew; max_us 0: none.
SIMCUDA_API void simcuda_set_delays(uint64_t seed, uint32_t max_us);
SIMCUDA_API CUresult simcuda_set_capturing(CUstream stream, int status);
// What cuDeviceGetAttribute answers for an attribute of all devices.
SIMCUDA_API void simcuda_set_attribute(int attribute, int value);

// Kernels. dtype: 0 float32, 1 float64, 2 int32, 3 int64.
// to[i] = a * from[i] + b
SIMCUDA_API CUresult simcuda_launch_scale_add(CUstream stream, CUdeviceptr to, CUdeviceptr from,
                                              size_t count, int dtype, double a, double b);
// to[i] += from[i]
SIMCUDA_API CUresult simcuda_launch_add(CUstream stream, CUdeviceptr to, CUdeviceptr from,
                                        size_t count, int dtype);

}  // extern "C"

#endif  // SIMCUDA_DRIVER_CONTROLS_HPP_
