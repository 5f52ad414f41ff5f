// Asynchronous calls, splits and several communicators, with the ranks of one node as threads.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <random>
#include <thread>

#include "support/ranks.hpp"

namespace {

using ranks::Operation;

struct Destroy {
  void operator()(hsgd_comm* comm) const { hsgd_comm_destroy(comm); }
  void operator()(hsgd_request* request) const { hsgd_request_free(request); }
};
using Comm = std::unique_ptr<hsgd_comm, Destroy>;
using Request = std::unique_ptr<hsgd_request, Destroy>;

Comm create(const std::string& path, int rank, int size,
            const hsgd_options& options = ranks::small_steps()) {
  hsgd_comm* comm = nullptr;
  hsgd_error error;
  if (hsgd_comm_create_local(path.c_str(), rank, size, &options, &comm, &error) != HSGD_OK) {
    throw hsgd::Error(static_cast<hsgd_status>(error.code), error.rank, error.message);
  }
  return Comm(comm);
}

// One operation of a program with its buffers, and what must be in them.
struct Call {
  Call(const Operation& drawn, int rank, int size)
      : operation(drawn), in(ranks::input_of(drawn, rank)), out(drawn.bytes()) {
    const bool in_place = operation.in_place || operation.kind != Operation::Kind::kAllreduce;
    call.kind = operation.kind == Operation::Kind::kAllreduce   ? HSGD_ALLREDUCE
                : operation.kind == Operation::Kind::kBroadcast ? HSGD_BROADCAST
                                                                : HSGD_BARRIER;
    call.in = in.data();
    call.out = in_place ? in.data() : out.data();
    call.count = operation.count;
    call.dtype = operation.dtype;
    call.op = operation.op;
    call.root = operation.root;
    if (operation.kind == Operation::Kind::kAllreduce)
      expected = ranks::expected(drawn, ranks::in_a_row({size}));
    if (operation.kind == Operation::Kind::kBroadcast)
      expected = ranks::input_of(drawn, drawn.root);
  }
  Call(const Call&) = delete;

  void start(const Comm& comm) {
    hsgd_request* made = nullptr;
    hsgd_error error;
    std::string name = "call " + std::to_string(operation.seed);  // gone when this returns
    std::vector<int64_t> shape = {static_cast<int64_t>(operation.count)};
    const hsgd_label label{name.c_str(), shape.data(), 1};
    call.label = &label;
    CHECK_EQ(hsgd_comm_start(comm.get(), &call, &made, &error), HSGD_OK);
    request.reset(made);
    name.assign(name.size(), '?');
    shape[0] = -1;
  }
  void run(const Comm& comm) {
    hsgd_error error;
    CHECK_EQ(hsgd_comm_run(comm.get(), &call, &error), HSGD_OK);
    check();
  }
  void wait(double timeout_s = -1) {
    hsgd_error error;
    int status = HSGD_ERR_PENDING;
    while (status == HSGD_ERR_PENDING) {
      status = hsgd_request_wait(request.get(), timeout_s, &error);
      CHECK(status == HSGD_ERR_PENDING || hsgd_request_done(request.get()));
    }
    if (!CHECK_EQ(status, HSGD_OK)) std::fprintf(stderr, "%s\n", error.message);
    check();
  }
  void check() const {
    const auto* bytes = static_cast<const std::byte*>(call.out);
    if (operation.kind != Operation::Kind::kBarrier)
      CHECK(std::equal(expected.begin(), expected.end(), bytes));
  }

  Operation operation;
  std::vector<std::byte> in;
  std::vector<std::byte> out;
  std::vector<std::byte> expected;
  hsgd_call call{};
  Request request;
};

// The same operations on all ranks, each blocking or not, waited for in any order and manner.
void random_program(const Comm& comm, int rank, int size, uint64_t seed, int operations) {
  std::mt19937_64 program(seed);
  std::mt19937_64 own(seed + static_cast<uint64_t>(rank));
  std::deque<std::unique_ptr<Call>> open;
  const auto wait_for_one = [&] {
    const size_t which = own() % open.size();
    open[which]->wait(own() % 3 == 0 ? 1e-4 : -1);
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
  };
  for (int i = 0; i < operations; ++i) {
    ranks::dawdle(own);
    auto call = std::make_unique<Call>(ranks::draw(program, size), rank, size);
    if (program() % 4 == 0) {
      call->run(comm);
      for (const auto& earlier : open) CHECK(hsgd_request_done(earlier->request.get()));
    } else {
      call->start(comm);
      open.push_back(std::move(call));
    }
    while (!open.empty() && (own() % 3 == 0 || open.size() > 20)) wait_for_one();
  }
  while (!open.empty()) wait_for_one();
}

hsgd_call doubles(std::vector<double>& data) {
  hsgd_call call{};
  call.kind = HSGD_ALLREDUCE;
  call.in = call.out = data.data();
  call.count = data.size();
  call.dtype = HSGD_FLOAT64;
  call.op = HSGD_SUM;
  return call;
}

Request start(const Comm& comm, const hsgd_call& call) {
  hsgd_request* request = nullptr;
  hsgd_error error;
  CHECK_EQ(hsgd_comm_start(comm.get(), &call, &request, &error), HSGD_OK);
  return Request(request);
}

int wait(const Request& request, hsgd_error* error, double timeout_s = -1) {
  return hsgd_request_wait(request.get(), timeout_s, error);
}

}  // namespace

TEST("programs of blocking and asynchronous calls give the reference, in order") {
  for (int size = 1; size <= 4; ++size) {
    const std::string path = ranks::meeting_point();
    ranks::run(size, [&](int rank) {
      const Comm comm = create(path, rank, size);
      random_program(comm, rank, size, static_cast<uint64_t>(size), ranks::kOperations / size);
    });
  }
}

TEST("several communicators work at once, each with a thread of its own") {
  constexpr int kSize = 3;
  const std::string paths[] = {ranks::meeting_point(), ranks::meeting_point()};
  ranks::run(2 * kSize, [&](int thread) {
    const int rank = thread / 2;
    const Comm comm = create(paths[thread % 2], rank, kSize);
    random_program(comm, rank, kSize, static_cast<uint64_t>(thread % 2 + 7),
                   ranks::kOperations / 8);
  });
}

TEST("two threads of a rank may submit to and wait on one communicator") {
  constexpr int kSize = 2;
  const std::string path = ranks::meeting_point();
  ranks::run(kSize, [&](int rank) {
    const Comm comm = create(path, rank, kSize);
    ranks::run(2, [&](int thread) {  // equal calls: each is one collective, whomever it meets
      for (int i = 0; i < ranks::kOperations / 4; ++i) {
        std::vector<double> data(100, rank + 1.0);
        hsgd_error error;
        const hsgd_call call = doubles(data);
        if ((i + thread) % 2 == 0) {
          CHECK_EQ(hsgd_comm_run(comm.get(), &call, &error), HSGD_OK);
        } else {
          const Request request = start(comm, call);
          CHECK_EQ(wait(request, &error), HSGD_OK);
        }
        CHECK_EQ(data[99], 3.0);
      }
    });
  });
}

TEST("two threads may wait for one request") {
  constexpr int kSize = 2;
  const std::string path = ranks::meeting_point();
  ranks::run(kSize, [&](int rank) {
    const Comm comm = create(path, rank, kSize);
    for (int i = 0; i < ranks::kOperations / 10; ++i) {
      std::vector<double> data(5000, 1.0);
      const Request request = start(comm, doubles(data));
      ranks::run(2, [&](int thread) {
        hsgd_error error;
        while (wait(request, &error, thread == 0 ? -1 : 1e-3) == HSGD_ERR_PENDING) {
        }
        CHECK_EQ(error.code, HSGD_OK);
        CHECK_EQ(data[4999], 2.0);
      });
    }
  });
}

TEST("destroying a communicator finishes what is open, and requests outlive it") {
  constexpr int kSize = 3;
  for (int i = 0; i < 20; ++i) {
    const std::string path = ranks::meeting_point();
    ranks::run(kSize, [&](int rank) {
      Comm comm = create(path, rank, kSize);
      std::vector<std::vector<double>> data(6, std::vector<double>(3000, 1.0));
      std::vector<Request> requests;
      for (auto& one : data) requests.push_back(start(comm, doubles(one)));
      requests.pop_back();  // nobody asks for the last one
      comm.reset();
      for (const Request& request : requests) {
        hsgd_error error;
        CHECK(hsgd_request_done(request.get()));
        CHECK_EQ(wait(request, &error), HSGD_OK);
      }
      for (const auto& one : data) CHECK_EQ(one[2999], 3.0);
    });
  }
}

TEST("an error is told to who waits for it, and the rest of the queue fails like later calls") {
  constexpr int kSize = 3;
  const std::string path = ranks::meeting_point();
  ranks::run(kSize, [&](int rank) {
    Comm comm = create(path, rank, kSize);
    hsgd_error error;
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_OK);
    if (rank == kSize - 1) return;
    std::vector<std::vector<double>> data(3, std::vector<double>(3000, 1.0));
    std::vector<Request> requests;
    for (auto& one : data) requests.push_back(start(comm, doubles(one)));
    for (int turn = 0; turn < 2; ++turn) {
      CHECK_EQ(wait(requests[2], &error), HSGD_ERR_PEER_LOST);
      CHECK(std::strstr(error.message, "broken since an earlier error: allreduce #2: rank") !=
            nullptr);
      CHECK_EQ(wait(requests[0], &error), HSGD_ERR_PEER_LOST);
      CHECK(std::strstr(error.message, "closed its communicator") != nullptr);
      CHECK_EQ(wait(requests[1], &error), HSGD_ERR_PEER_LOST);
    }
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_ERR_PEER_LOST);
  });
}

TEST("ranks that differ in an asynchronous call are told so, and the queue goes on") {
  constexpr int kSize = 2;
  const std::string path = ranks::meeting_point();
  ranks::run(kSize, [&](int rank) {
    const Comm comm = create(path, rank, kSize);
    std::vector<double> bad(rank == 0 ? 10 : 5000, 1.0);
    std::vector<double> good(5000, 1.0);
    const Request first = start(comm, doubles(bad));
    const Request second = start(comm, doubles(good));
    hsgd_error error;
    CHECK_EQ(wait(second, &error), HSGD_OK);
    CHECK_EQ(good[0], 2.0);
    CHECK_EQ(wait(first, &error), HSGD_ERR_SIGNATURE);
    CHECK_EQ(bad[0], 1.0);
  });
}

TEST("wrong arguments are refused at once and nothing is submitted") {
  const Comm comm = create(ranks::meeting_point(), 0, 1);
  std::vector<double> data(10, 1.0);
  const auto refused = [&](const hsgd_call& call, const char* part) {
    hsgd_request* request = nullptr;
    hsgd_error error;
    CHECK_EQ(hsgd_comm_start(comm.get(), &call, &request, &error), HSGD_ERR_ARGUMENT);
    CHECK(request == nullptr);
    CHECK(std::strstr(error.message, part) != nullptr);
    CHECK_EQ(hsgd_comm_run(comm.get(), &call, &error), HSGD_ERR_ARGUMENT);
  };
  hsgd_call call = doubles(data);
  call.out = data.data() + 1;
  refused(call, "overlap");
  call = doubles(data);
  call.dtype = HSGD_DTYPE_COUNT;
  refused(call, "dtype");
  call = doubles(data);
  call.kind = HSGD_KIND_COUNT;
  refused(call, "kind");
  call = doubles(data);
  call.kind = HSGD_BROADCAST;
  call.root = 1;
  refused(call, "root 1");
  call = doubles(data);
  call.kind = HSGD_FUNCTION;
  refused(call, "function");
}

namespace {

// A function as a call; it must live until it has been called.
hsgd_call calling(const std::function<void()>& function) {
  hsgd_call call{};
  call.kind = HSGD_FUNCTION;
  call.context = const_cast<std::function<void()>*>(&function);
  call.function = [](void* context) { (*static_cast<std::function<void()>*>(context))(); };
  return call;
}

void run(const Comm& comm, const hsgd_call& call) {
  hsgd_error error;
  if (!CHECK_EQ(hsgd_comm_run(comm.get(), &call, &error), HSGD_OK))
    std::fprintf(stderr, "%s\n", error.message);
}

}  // namespace

// Sizes differ from call to call, so that another order on another rank is an error.
TEST("functions run in their turn, and what they submit comes next, on all ranks") {
  constexpr int kSize = 3;
  const std::string path = ranks::meeting_point();
  ranks::run(kSize, [&](int rank) {
    const Comm comm = create(path, rank, kSize);
    std::mt19937_64 own(static_cast<uint64_t>(rank));
    for (int i = 0; i < ranks::kOperations / 5; ++i) {
      std::vector<std::vector<double>> data;
      for (size_t count = 1; count <= 7; ++count) data.emplace_back(10 * count, 1.0);
      Request inner;
      Request innermost;
      const std::function<void()> last = [&] { run(comm, doubles(data[4])); };
      const std::function<void()> function = [&] {
        run(comm, doubles(data[1]));
        inner = start(comm, doubles(data[2]));
        if (i % 2 == 0) run(comm, doubles(data[3]));  // after `inner`
        innermost = start(comm, calling(last));
        hsgd_error error;
        if (i % 3 == 0) CHECK_EQ(wait(innermost, &error, 1e-9), HSGD_OK);
        CHECK_EQ(hsgd_request_done(inner.get()) != 0, i % 2 == 0 || i % 3 == 0);
      };
      const Request first = start(comm, doubles(data[0]));
      Request second;
      if (i % 4 == 0) {
        run(comm, calling(function));
        CHECK(hsgd_request_done(first.get()));
      } else {
        second = start(comm, calling(function));
      }
      const Request third = start(comm, doubles(data[5]));
      ranks::dawdle(own);
      hsgd_error error;
      if (second != nullptr && own() % 2 == 0) CHECK_EQ(wait(second, &error), HSGD_OK);
      if (own() % 2 == 0) CHECK_EQ(wait(third, &error), HSGD_OK);
      run(comm, doubles(data[6]));  // after all others
      for (const auto& one : data)
        CHECK_EQ(one[0], &one == &data[3] && i % 2 != 0 ? 1.0 : double{kSize});
      CHECK(hsgd_request_done(innermost.get()));
    }
  });
}

TEST("functions may follow one another without end, and wait for themselves in vain") {
  const Comm comm = create(ranks::meeting_point(), 0, 1);
  int left = 100'000;
  std::vector<Request> requests;  // of the functions' thread
  requests.reserve(static_cast<size_t>(left));
  std::function<void()> function = [&] {
    if (left-- > 0) requests.push_back(start(comm, calling(function)));
  };
  const Request first = start(comm, calling(function));
  hsgd_error error;
  CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_OK);
  CHECK_EQ(left, -1);
  Request own;
  std::atomic<bool> known{false};
  int status = HSGD_OK;
  const std::function<void()> waits = [&] {
    while (!known) std::this_thread::yield();
    hsgd_error told;
    status = wait(own, &told);
  };
  own = start(comm, calling(waits));
  known = true;
  CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_OK);
  CHECK_EQ(status, HSGD_ERR_SYSTEM);
}

TEST("a blocking call also waits for a function that executes later requests within itself") {
  const Comm comm = create(ranks::meeting_point(), 0, 1);
  std::atomic<bool> running{false};
  std::atomic<bool> known{false};
  std::atomic<bool> ended{false};
  Request later;
  const auto nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  const std::function<void()> waiting = [&] {
    running = true;
    while (!known) std::this_thread::yield();
    hsgd_error error;
    CHECK_EQ(wait(later, &error), HSGD_OK);
    nap();
    ended = true;
  };
  const Request first = start(comm, calling(waiting));
  while (!running) std::this_thread::yield();
  std::thread other([&] {
    hsgd_error error;
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_OK);
    CHECK(ended);
  });
  nap();
  const std::function<void()> short_one = nap;
  later = start(comm, calling(short_one));
  known = true;
  other.join();
}

TEST("a function may destroy the communicator, after what was submitted") {
  constexpr int kSize = 2;
  for (int i = 0; i < 20; ++i) {
    const std::string path = ranks::meeting_point();
    ranks::run(kSize, [&](int rank) {
      hsgd_comm* comm = create(path, rank, kSize).release();
      const auto start_it = [&](const hsgd_call& call) {
        hsgd_request* request = nullptr;
        hsgd_error error;
        CHECK_EQ(hsgd_comm_start(comm, &call, &request, &error), HSGD_OK);
        return Request(request);
      };
      std::vector<double> data(100, 1.0);
      std::vector<double> more(200, 1.0);
      std::atomic<bool> submitted{false};
      Request inner;
      const std::function<void()> function = [&] {
        while (!submitted) std::this_thread::yield();
        inner = start_it(doubles(more));
        hsgd_comm_destroy(comm);
      };
      const Request first = start_it(calling(function));
      const Request second = start_it(doubles(data));
      submitted = true;
      hsgd_error error;
      CHECK_EQ(wait(first, &error, 30), HSGD_OK);
      CHECK_EQ(wait(second, &error, 30), HSGD_OK);
      CHECK_EQ(more[0], 2.0);
      CHECK_EQ(data[0], 2.0);
    });
  }
}

TEST("a wait with a time limit leaves the collective running") {
  const std::string path = ranks::meeting_point();
  std::atomic<bool> come{false};
  ranks::run(2, [&](int rank) {
    const Comm comm = create(path, rank, 2);
    std::vector<double> data(2000, 1.0);
    if (rank == 1) {
      while (!come) std::this_thread::yield();
    }
    const Request request = start(comm, doubles(data));
    hsgd_error error;
    if (rank == 0) {
      for (const double timeout_s : {0.0, 0.01, 0.1}) {
        CHECK_EQ(wait(request, &error, timeout_s), HSGD_ERR_PENDING);
        CHECK(!hsgd_request_done(request.get()));
      }
      come = true;
    }
    CHECK_EQ(wait(request, &error), HSGD_OK);
    CHECK_EQ(data[1999], 2.0);
  });
}

namespace {

std::atomic<bool> interrupt_wanted{false};
std::thread::id may_ask;

int interrupted() {
  CHECK(std::this_thread::get_id() == may_ask);
  return interrupt_wanted ? 1 : 0;
}

}  // namespace

TEST("an interrupted wait breaks the communicator, tells the peers and asks in its own thread") {
  enum { kWait, kWaitWithLimit, kBlockingCall, kWays };
  for (int way = 0; way < kWays; ++way) {
    const std::string path = ranks::meeting_point();
    std::atomic<bool> told{false};
    interrupt_wanted = false;
    ranks::run(2, [&](int rank) {
      hsgd_options options = ranks::small_steps();
      if (rank == 0) {
        may_ask = std::this_thread::get_id();
        options.interrupted = interrupted;
      }
      const Comm comm = create(path, rank, 2, options);
      hsgd_error error;
      if (rank == 1) {
        while (!told) std::this_thread::yield();
        std::vector<double> data(2000, 1.0);
        const hsgd_call call = doubles(data);
        CHECK_EQ(hsgd_comm_run(comm.get(), &call, &error), HSGD_ERR_PEER_LOST);
        CHECK(std::strstr(error.message, "rank 0 was interrupted") != nullptr);
        return;
      }
      std::vector<double> data(2000, 1.0);
      const Request first = start(comm, doubles(data));
      const Request second = start(comm, doubles(data));
      std::thread user([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        interrupt_wanted = true;
      });
      CHECK_EQ(way == kBlockingCall ? hsgd_comm_barrier(comm.get(), &error)
                                    : wait(first, &error, way == kWait ? -1 : 30),
               HSGD_ERR_INTERRUPTED);
      user.join();
      interrupt_wanted = false;
      CHECK_EQ(wait(first, &error), HSGD_ERR_INTERRUPTED);
      CHECK_EQ(wait(second, &error), HSGD_ERR_CLOSED);
      told = true;
    });
  }
}

TEST("split makes communicators of each color, ordered by key and then rank") {
  constexpr int kSize = 5;
  const std::string path = ranks::meeting_point();
  const int colors[kSize] = {7, 0, 7, -1, 7};
  const int keys[kSize] = {5, 0, -2147483647 - 1, 0, 5};
  const int expected_rank[kSize] = {1, 0, 0, -1, 2};
  const int expected_size[kSize] = {3, 1, 3, -1, 3};
  ranks::run(kSize, [&](int rank) {
    const Comm comm = create(path, rank, kSize);
    std::vector<double> data(3000, rank);
    const Request open = start(comm, doubles(data));
    hsgd_comm* made = nullptr;
    hsgd_error error;
    CHECK_EQ(hsgd_comm_split(comm.get(), colors[rank], keys[rank], nullptr, &made, &error),
             HSGD_OK);
    CHECK(hsgd_request_done(open.get()));
    const Comm part(made);
    CHECK_EQ(part == nullptr, colors[rank] < 0);
    if (part != nullptr) {
      hsgd_topology topology;
      hsgd_comm_topology(part.get(), &topology);
      CHECK_EQ(topology.rank, expected_rank[rank]);
      CHECK_EQ(topology.size, expected_size[rank]);
      std::vector<double> sum(3000, rank);
      const hsgd_call call = doubles(sum);
      CHECK_EQ(hsgd_comm_run(part.get(), &call, &error), HSGD_OK);
      CHECK_EQ(sum[2999], colors[rank] == 7 ? 6.0 : 1.0);
    }
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_OK);
    CHECK_EQ(data[0], 10.0);
  });
}

namespace {

// Where the result of a call with rows goes: into a vector, or nowhere.
struct Joined {
  std::vector<int64_t> data;
  std::vector<uint64_t> rows;
  bool refuses = false;
};

void* place(void* context, const uint64_t* rows, hsgd_error* err) {
  auto& joined = *static_cast<Joined*>(context);
  uint64_t total = 0;
  for (uint64_t& each : joined.rows) total += each = *rows++;
  if (joined.refuses) {
    *err = {HSGD_ERR_MEMORY, -1, "there is no room", {}};
    return nullptr;
  }
  joined.data.assign(2 * total, -1);
  return joined.data.data();
}

hsgd_call of_rows(hsgd_kind kind, const std::vector<int64_t>& in, Joined& joined) {
  hsgd_call call{};
  call.kind = kind;
  call.in = in.data();
  call.dtype = HSGD_INT64;
  call.row_elements = 2;
  call.place = place;
  call.context = &joined;
  return call;
}

}  // namespace

TEST("ranks that know their own rows only get those of all, and who refuses disturbs nobody") {
  for (int size = 1; size <= 4; ++size) {
    const std::string path = ranks::meeting_point();
    ranks::run(size, [&](int rank) {
      const auto own = static_cast<uint64_t>(rank);
      const auto ranks_count = static_cast<size_t>(size);
      const Comm comm = create(path, rank, size);
      for (const uint64_t length : {0, 1, 1000}) {
        Joined gathered{{}, std::vector<uint64_t>(ranks_count), length == 1 && rank == 1};
        Joined exchanged = gathered;
        const std::vector<int64_t> mine(2 * (length + own), rank);
        hsgd_call gather = of_rows(HSGD_ALLGATHER_ROWS, mine, gathered);
        gather.count = length + own;
        const std::vector<uint64_t> counts(ranks_count, length + own);
        const std::vector<int64_t> parts(2 * ranks_count * (length + own), rank);
        hsgd_call exchange = of_rows(HSGD_ALLTOALL_ROWS, parts, exchanged);
        exchange.counts = counts.data();
        const Request first = start(comm, gather);
        const Request second = start(comm, exchange);
        hsgd_error error;
        const int expected = gathered.refuses ? HSGD_ERR_MEMORY : HSGD_OK;
        CHECK_EQ(wait(second, &error), expected);
        CHECK_EQ(wait(first, &error), expected);
        if (gathered.refuses) continue;
        for (const Joined* joined : {&gathered, &exchanged}) {
          auto value = joined->data.begin();
          for (int from = 0; from < size; ++from) {
            const uint64_t rows = length + static_cast<uint64_t>(from);
            CHECK_EQ(joined->rows[static_cast<size_t>(from)], rows);
            for (uint64_t i = 0; i < 2 * rows; ++i) CHECK_EQ(*value++, from);
          }
          CHECK(value == joined->data.end());
        }
      }
    });
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// The sanitizers end a program that asks for that much.
TEST("a rank without any memory for the result breaks off and the others are told") {
  const std::string path = ranks::meeting_point();
  ranks::run(2, [&](int rank) {
    const Comm comm = create(path, rank, 2);
    const std::vector<int64_t> mine(2);
    Joined joined{{}, std::vector<uint64_t>(2), rank == 1};
    hsgd_call gather = of_rows(HSGD_ALLGATHER_ROWS, mine, joined);
    gather.count = rank == 1 ? uint64_t{1} << 52 : 0;
    // Rank 0 says where the result goes and never comes to write there.
    if (rank == 0) {
      gather.context = const_cast<int64_t*>(mine.data());
      gather.place = [](void* context, const uint64_t*, hsgd_error*) { return context; };
    }
    hsgd_error error;
    const int status = hsgd_comm_run(comm.get(), &gather, &error);
    CHECK_EQ(status, HSGD_ERR_MEMORY);
    CHECK_EQ(error.rank, 1);
    CHECK(std::strstr(error.message, "rank 1 has no memory for a result of") != nullptr);
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_ERR_CLOSED);
  });
}
#endif
