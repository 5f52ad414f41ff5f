#include "binding/window.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdio>

#include "binding/collective_call.hpp"
#include "binding/gil.hpp"

namespace hsgd::python {

template <class Call>
void NotifiedWindow::call(Call&& call) {
  hsgd_error error{};
  if (window_ == nullptr) {
    std::snprintf(error.message, sizeof error.message, "this NotifiedWindow is closed");
    raise_on_error(HSGD_ERR_CLOSED, error);
  }
  int status = 0;
  // Another thread may close it meanwhile, and the communicator, which goes last.
  std::shared_ptr<hsgd_comm> comm = comm_;
  std::shared_ptr<hsgd_window> window = window_;
  const std::shared_ptr<Open> open = open_;
  {
    const ReleasedGil released;
    status = call(window.get(), &error);
    window.reset();
    comm.reset();
  }
  raise_on_error(status, error);
}

uint64_t NotifiedWindow::put_notify(const std::vector<std::pair<nb::object, uint64_t>>& pieces,
                                    int target, uint32_t slot, uint64_t version, double timeout_s,
                                    uint32_t order) {
  Arrays arrays;
  std::vector<hsgd_piece> list;
  for (const auto& [object, offset] : pieces) {
    const Array& array = arrays.emplace_back(object, "put_notify", false);
    list.push_back({array.data(), array.count() * hsgd_dtype_bytes(array.dtype()), offset});
  }
  uint64_t ticket = 0;
  const std::shared_ptr<Open> open = open_;
  int status = HSGD_OK;
  const auto put = [&](hsgd_window* window, hsgd_error* error) {
    status = hsgd_window_put_notify(window, list.data(), list.size(), target, slot, version,
                                    timeout_s, order, &ticket, error);
    return status;
  };
  try {
    call(put);
  } catch (...) {
    const bool refused = status == HSGD_OK || status == HSGD_ERR_ARGUMENT;
    if (!refused) open->failed.push_back(std::move(arrays));
    throw;
  }
  if (ticket != 0) {
    open->by_ticket.emplace_back(ticket, std::move(arrays));
    give_arrays_back();
  }
  return ticket;
}

void NotifiedWindow::give_arrays_back() {
  const std::shared_ptr<Open> open = open_;
  auto& writes = open->by_ticket;
  while (!writes.empty()) {
    const uint64_t ticket = writes.front().first;
    bool open_still = false;
    bool failed = false;
    try {
      open_still = !done(ticket);
    } catch (const nb::python_error&) {
      failed = true;  // whoever asks for this ticket is told
    }
    // Without the GIL another thread may have given it back.
    if (writes.empty() || writes.front().first != ticket) continue;
    if (open_still) {  // one whose target stands still does not keep those behind it
      writes.push_back(std::move(writes.front()));
      writes.pop_front();
      return;
    }
    Arrays delivered = std::move(writes.front().second);
    writes.pop_front();
    if (failed) open->failed.push_back(std::move(delivered));
  }
}

bool NotifiedWindow::done(uint64_t ticket) {
  int done = 0;
  call([&](hsgd_window* window, hsgd_error* error) {
    return hsgd_window_done(window, ticket, &done, error);
  });
  return done != 0;
}

void NotifiedWindow::drain(double timeout_s) {
  call([&](hsgd_window* window, hsgd_error* error) {
    return hsgd_window_drain(window, timeout_s, error);
  });
  give_arrays_back();
}

std::pair<uint32_t, uint64_t> NotifiedWindow::wait_any(const std::vector<uint32_t>& slots,
                                                       const std::vector<uint64_t>& seen,
                                                       double timeout_s) {
  std::pair<uint32_t, uint64_t> found{};
  call([&](hsgd_window* window, hsgd_error* error) {
    return hsgd_window_wait_any(window, slots.data(), seen.data(), slots.size(), timeout_s,
                                &found.first, &found.second, error);
  });
  return found;
}

uint64_t NotifiedWindow::test(uint32_t slot) {
  uint64_t version = 0;
  call([&](hsgd_window* window, hsgd_error* error) {
    return hsgd_window_test(window, slot, &version, error);
  });
  return version;
}

uint64_t NotifiedWindow::reset(uint32_t slot) {
  uint64_t version = 0;
  call([&](hsgd_window* window, hsgd_error* error) {
    return hsgd_window_reset(window, slot, &version, error);
  });
  return version;
}

void NotifiedWindow::bind(uint32_t slot, int source) {
  call([&](hsgd_window* window, hsgd_error* error) {
    return hsgd_window_bind(window, slot, source, error);
  });
}

// The bytes live as long as the array and all that is made of it; None: on another node.
nb::object NotifiedWindow::segment(int rank, uint64_t bytes) {
  void* data = nullptr;
  hsgd_buffer* memory = nullptr;
  call([&](hsgd_window* window, hsgd_error* error) {
    return hsgd_window_segment(window, rank, &data, &memory, error);
  });
  if (data == nullptr) return nb::none();
  const nb::capsule owner(
      memory, [](void* held) noexcept { hsgd_buffer_free(static_cast<hsgd_buffer*>(held)); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, owner));
}

void NotifiedWindow::abandon() {
  if (window_ != nullptr) hsgd_window_abandon(window_.get());
}

void NotifiedWindow::end_work() {
  if (window_ != nullptr) hsgd_window_end_work(window_.get());
}

Tree NotifiedWindow::tree(const std::vector<Tree::Layer>& layers, const Tree::Options& options) {
  if (window_ == nullptr) call([](hsgd_window*, hsgd_error*) { return 0; });  // says so
  return Tree(comm_, window_, layers, options);
}

void NotifiedWindow::close() {
  std::shared_ptr<hsgd_window> window = std::move(window_);
  window_ = nullptr;
  {
    const ReleasedGil released;
    window.reset();
  }
  open_ = std::make_shared<Open>();
  comm_.reset();
}

void bind_window(nb::module_& module) {
  nb::class_<hsgd_window_options>(module, "WindowOptions")
      .def(
          "__init__",
          [](hsgd_window_options* self, uint64_t segment_bytes, uint32_t slots, uint32_t queue,
             double timeout_s, bool remote_only, bool sockets, bool forgiving,
             uint64_t slice_bytes) {
            new (self) hsgd_window_options{
                sizeof(hsgd_window_options),
                slots,
                segment_bytes,
                queue,
                remote_only,
                timeout_s,
                static_cast<uint32_t>(sockets ? HSGD_NETWORK_SOCKETS : HSGD_NETWORK_MPI),
                forgiving,
                slice_bytes};
          },
          nb::kw_only(), nb::arg("segment_bytes"), nb::arg("slots"), nb::arg("queue"),
          nb::arg("timeout_s"), nb::arg("remote_only"), nb::arg("sockets"), nb::arg("forgiving"),
          nb::arg("slice_bytes"))
      .def_prop_ro(
          "sockets",
          [](const hsgd_window_options& self) { return self.network == HSGD_NETWORK_SOCKETS; })
      .def_ro("remote_only", &hsgd_window_options::remote_only);
  nb::class_<NotifiedWindow>(module, "NotifiedWindow")
      .def("put_notify", &NotifiedWindow::put_notify)
      .def("done", &NotifiedWindow::done)
      .def("drain", &NotifiedWindow::drain)
      .def("wait_any", &NotifiedWindow::wait_any)
      .def("test", &NotifiedWindow::test)
      .def("reset", &NotifiedWindow::reset)
      .def("bind", &NotifiedWindow::bind)
      .def("segment", &NotifiedWindow::segment)
      .def("end_work", &NotifiedWindow::end_work)
      .def("abandon", &NotifiedWindow::abandon)
      .def("descriptor", &NotifiedWindow::descriptor)
      .def("tree", &NotifiedWindow::tree)
      .def("close", &NotifiedWindow::close)
      .def("closed", &NotifiedWindow::closed);
}

}  // namespace hsgd::python
