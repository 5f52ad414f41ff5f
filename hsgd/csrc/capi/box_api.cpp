// The C interface over Box: checks arguments, turns exceptions into status codes.
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "base/status.hpp"
#include "box/box.hpp"
#include "hsgd_core.h"

struct hsgd_box {
  std::unique_ptr<hsgd::Box> box;
  bool is_mine() const { return box->is_mine(); }
};

namespace hsgd {
namespace {

void check(const hsgd_box_options& options) {
  constexpr uint64_t kMostValues = uint64_t{1} << 40;
  constexpr uint64_t kMostOfChunk = uint64_t{1} << 26;
  constexpr uint32_t kMostCounters = 1 << 20;
  if (options.struct_bytes != sizeof(hsgd_box_options)) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "hsgd_box_options has another size; caller and libhsgd_core differ in version");
  }
  if (options.count > kMostValues) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("ParameterBox: %llu values are too many",
                     static_cast<unsigned long long>(options.count)));
  }
  if (options.chunk_count < 1 || options.chunk_count > kMostOfChunk) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("ParameterBox: chunks of %llu values; give 1 to %llu",
                     static_cast<unsigned long long>(options.chunk_count),
                     static_cast<unsigned long long>(kMostOfChunk)));
  }
  if (options.counters > kMostCounters) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("ParameterBox: %u counters; give up to %u", options.counters, kMostCounters));
  }
}

Deadline deadline_of(const hsgd_patience& patience) {
  if (!(patience.timeout_s >= 0 && patience.timeout_s <= 1e9)) {
    throw Error(
        HSGD_ERR_ARGUMENT, -1,
        text("ParameterBox: timeout_s is %g; give seconds from 0 to 1e9", patience.timeout_s));
  }
  return Deadline(patience.timeout_s, patience.interrupted);
}

}  // namespace
}  // namespace hsgd

using hsgd::guarded;

int hsgd_box_create(const char* key, const hsgd_box_options* options, const float* initial,
                    hsgd_box** box, hsgd_error* err) {
  return guarded(err, [&] {
    *box = nullptr;
    hsgd::check(*options);
    const hsgd::BoxPlan plan{options->count, options->chunk_count, options->counters};
    *box = new hsgd_box{hsgd::Box::create(key, plan, initial)};
  });
}

int hsgd_box_attach(const char* key, const hsgd_patience* patience, hsgd_box** box,
                    hsgd_error* err) {
  return guarded(err, [&] {
    *box = nullptr;
    *box = new hsgd_box{hsgd::Box::attach(key, hsgd::deadline_of(*patience))};
  });
}

// A forked child has not the thread that answers at the door.
void hsgd_box_destroy(hsgd_box* box) {
  if (box != nullptr && box->is_mine()) delete box;
}

void hsgd_box_describe(const hsgd_box* box, hsgd_box_options* options) {
  const hsgd::BoxPlan& plan = box->box->plan();
  *options = {sizeof(hsgd_box_options), plan.counters, plan.count, plan.chunk_count};
}

uint64_t hsgd_box_version(const hsgd_box* box) { return box->box->version(); }
uint64_t hsgd_box_recoveries(const hsgd_box* box) { return box->box->recoveries(); }

int hsgd_box_read(hsgd_box* box, float* out, uint64_t offset, uint64_t count,
                  const hsgd_patience* patience, uint64_t* version, hsgd_error* err) {
  return guarded(err, [&] {
    *version = box->box->version();
    box->box->read(out, offset, count, hsgd::deadline_of(*patience));
  });
}

int hsgd_box_write(hsgd_box* box, const float* values, uint64_t offset, uint64_t count,
                   int finishes, const hsgd_patience* patience, uint64_t* version,
                   hsgd_error* err) {
  return guarded(err, [&] {
    *version = box->box->write(values, offset, count, finishes != 0, hsgd::deadline_of(*patience));
  });
}

int hsgd_box_accumulate(hsgd_box* box, const void* delta, hsgd_dtype dtype, uint64_t offset,
                        uint64_t count, float* sums, int finishes, const hsgd_patience* patience,
                        uint64_t* version, hsgd_error* err) {
  return guarded(err, [&] {
    *version = box->box->accumulate(delta, dtype, offset, count, sums, finishes != 0,
                                    hsgd::deadline_of(*patience));
  });
}

int hsgd_box_take_copy(hsgd_box* box, const float* values, uint64_t offset, uint64_t count,
                       uint64_t stamp, uint64_t version, const hsgd_patience* patience,
                       hsgd_error* err) {
  return guarded(err, [&] {
    box->box->take_copy(values, offset, count, stamp, version, hsgd::deadline_of(*patience));
  });
}

int hsgd_box_check(hsgd_box* box, const char* what, uint64_t offset, uint64_t count,
                   hsgd_error* err) {
  return guarded(err, [&] { box->box->check_range(what, offset, count); });
}

int hsgd_box_elastic(hsgd_box* box, const hsgd_box_tensor* tensors, uint64_t count, float rate,
                     void* delta, hsgd_dtype dtype, const hsgd_patience* patience, double* squares,
                     uint64_t* version, hsgd_error* err) {
  return guarded(err, [&] {
    std::vector<hsgd::Box::Tensor> weights;
    weights.reserve(count);
    for (uint64_t i = 0; i < count; ++i) weights.push_back({tensors[i].data, tensors[i].count});
    *version = box->box->version();
    *squares = box->box->elastic(weights, rate, delta, dtype, hsgd::deadline_of(*patience));
  });
}

int hsgd_box_fetch_add(hsgd_box* box, uint32_t counter, int64_t value, int64_t* before,
                       hsgd_error* err) {
  return guarded(err, [&] { *before = box->box->fetch_add(counter, value); });
}
