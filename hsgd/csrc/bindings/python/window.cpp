// NotifiedWindow: calls the core without the GIL, and keeps the arrays of writes in progress.
#include "bindings/python/window.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings/c/open_window.hpp"
#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"

namespace hsgd::python {

// Keeps both objects: a thread that waits in the window when it is closed needs them until it
// returns.
NotifiedWindow::NotifiedWindow(const std::shared_ptr<hsgd_comm>& comm,
                               std::unique_ptr<hsgd::NotifiedWindow> window)
    : comm_(comm), window_(window.release(), [comm](hsgd::NotifiedWindow* held) {
        if (held->is_mine()) delete held;
      }) {}

template <class Call>
auto NotifiedWindow::call(Call&& call) {
  if (window_ == nullptr) raise_closed("NotifiedWindow");
  // Another thread may close the window and the communicator meanwhile; the communicator is
  // released last.
  std::shared_ptr<hsgd_comm> comm = comm_;
  std::shared_ptr<hsgd::NotifiedWindow> window = window_;
  const std::shared_ptr<Open> open = open_;
  return without_gil([&] {
    struct Leave {  // without the GIL, also after an exception
      std::shared_ptr<hsgd_comm> comm;
      std::shared_ptr<hsgd::NotifiedWindow> window;
    } const held{std::move(comm), std::move(window)};
    return call(*held.window);
  });
}

uint64_t NotifiedWindow::put_notify(const std::vector<std::pair<nb::object, uint64_t>>& pieces,
                                    int target, uint32_t slot, uint64_t version, double timeout_s,
                                    uint32_t order) {
  Arrays arrays;
  std::vector<Piece> list;
  for (const auto& [object, offset] : pieces) {
    const Array& array = arrays.emplace_back(object, "put_notify", false);
    list.push_back({array.data(), array.count() * hsgd_dtype_bytes(array.dtype()), offset});
  }
  const std::shared_ptr<Open> open = open_;
  bool refused = true;  // nothing was sent
  uint64_t ticket = 0;
  try {
    ticket = call([&](hsgd::NotifiedWindow& window) {
      try {
        return window.put_notify(list, target, slot, version, timeout_s, order);
      } catch (const Error& error) {
        refused = error.code() == HSGD_ERR_ARGUMENT;
        throw;
      } catch (...) {
        refused = false;
        throw;
      }
    });
  } catch (...) {
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
      failed = true;  // the caller that asks for this ticket gets the error
    }
    // Another thread may have released it while this one was without the GIL.
    if (writes.empty() || writes.front().first != ticket) continue;
    if (open_still) {  // a write to a stalled target does not hold back those behind it
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
  return call([&](hsgd::NotifiedWindow& window) { return window.done(ticket); });
}

void NotifiedWindow::drain(double timeout_s) {
  call([&](hsgd::NotifiedWindow& window) { window.drain(timeout_s); });
  give_arrays_back();
}

std::pair<uint32_t, uint64_t> NotifiedWindow::wait_any(const std::vector<uint32_t>& slots,
                                                       const std::vector<uint64_t>& seen,
                                                       double timeout_s) {
  std::vector<hsgd::NotifiedWindow::Seen> list;
  for (size_t i = 0; i < slots.size(); ++i) list.push_back({slots[i], seen[i]});
  const auto found =
      call([&](hsgd::NotifiedWindow& window) { return window.wait_any(list, timeout_s); });
  return {found.slot, found.version};
}

uint64_t NotifiedWindow::test(uint32_t slot) {
  return call([&](hsgd::NotifiedWindow& window) { return window.test(slot); });
}

uint64_t NotifiedWindow::reset(uint32_t slot) {
  return call([&](hsgd::NotifiedWindow& window) { return window.reset(slot); });
}

void NotifiedWindow::bind(uint32_t slot, int source) {
  call([&](hsgd::NotifiedWindow& window) { window.bind(slot, source); });
}

// Returns the bytes of a rank's segment, which live as long as the array and everything made of it;
// None for other nodes.
Anything NotifiedWindow::segment(int rank, uint64_t bytes) {
  using Memory = std::shared_ptr<SharedBuffer>;
  std::unique_ptr<Memory> memory;
  std::byte* const data = call([&](hsgd::NotifiedWindow& window) {
    memory = std::make_unique<Memory>(window.memory());
    return window.segment(rank);
  });
  if (data == nullptr) return nb::none();
  const nb::capsule owner(memory.release(),
                          [](void* held) noexcept { delete static_cast<Memory*>(held); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, owner));
}

void NotifiedWindow::abandon() {
  if (window_ != nullptr) window_->abandon();
}

void NotifiedWindow::end_work() {
  if (window_ != nullptr) window_->end_work();
}

Tree NotifiedWindow::tree(std::vector<hsgd::Tree::Layer> layers, hsgd::Tree::Settings settings) {
  if (window_ == nullptr) raise_closed("NotifiedWindow");
  settings.layers = std::move(layers);
  return Tree(comm_, window_, std::move(settings));
}

void NotifiedWindow::close() {
  std::shared_ptr<hsgd::NotifiedWindow> window = std::move(window_);
  window_ = nullptr;
  {
    const ReleasedGil released;
    window.reset();
  }
  open_ = std::make_shared<Open>();
  comm_.reset();
}

void bind_window(nb::module_& module) {
  nb::class_<WindowOptions>(module, "WindowOptions")
      .def(
          "__init__",
          [](WindowOptions* self, uint64_t segment_bytes, uint32_t slots, uint32_t queue,
             double timeout_s, bool remote_only, bool sockets, bool forgiving, uint64_t slice_bytes,
             const std::string& interfaces) {
            new (self)
                WindowOptions{{segment_bytes, slots, queue, timeout_s, remote_only, forgiving},
                              sockets,
                              slice_bytes,
                              interfaces};
          },
          nb::kw_only(), nb::arg("segment_bytes"), nb::arg("slots"), nb::arg("queue"),
          nb::arg("timeout_s"), nb::arg("remote_only"), nb::arg("sockets"), nb::arg("forgiving"),
          nb::arg("slice_bytes"), nb::arg("interfaces"))
      .def_ro("sockets", &WindowOptions::sockets)
      .def_prop_ro("remote_only",
                   [](const WindowOptions& self) { return self.settings.remote_only; });
  nb::class_<NotifiedWindow>(module, "NotifiedWindow")
      .def("put_notify", &NotifiedWindow::put_notify, nb::arg("pieces"), nb::arg("target"),
           nb::arg("slot"), nb::arg("version"), nb::arg("timeout_s"), nb::arg("order"))
      .def("done", &NotifiedWindow::done, nb::arg("ticket"))
      .def("drain", &NotifiedWindow::drain, nb::arg("timeout_s"))
      .def("wait_any", &NotifiedWindow::wait_any, nb::arg("slots"), nb::arg("seen"),
           nb::arg("timeout_s"))
      .def("test", &NotifiedWindow::test, nb::arg("slot"))
      .def("reset", &NotifiedWindow::reset, nb::arg("slot"))
      .def("bind", &NotifiedWindow::bind, nb::arg("slot"), nb::arg("source"))
      .def("segment", &NotifiedWindow::segment, nb::arg("rank"), nb::arg("size"))
      .def("end_work", &NotifiedWindow::end_work)
      .def("abandon", &NotifiedWindow::abandon)
      .def("descriptor", &NotifiedWindow::descriptor)
      .def("tree", &NotifiedWindow::tree, nb::arg("layers"), nb::arg("options"))
      .def("close", &NotifiedWindow::close)
      .def("closed", &NotifiedWindow::closed);
}

}  // namespace hsgd::python
