// Names of ranks (hsgd_options.rank_names): errors call the ranks by them, on all nodes.
#include "bindings/c/handles.hpp"
#include "collectives/queue/split.hpp"
#include "core/base/status.hpp"
#include "onesided/window/notified_window.hpp"
#include "support/cluster.hpp"

namespace {

using ranks::Cluster;

constexpr int32_t kNames[] = {20, 0, 7, 1};
constexpr int kLeaver = 2;

hsgd_options named(double timeout_s = 60) {
  hsgd_options options = ranks::small_steps(timeout_s);
  options.rank_names = kNames;
  return options;
}

const Cluster kClusters[] = {{{4}, named(), {}}, {{2, 2}, named(), {}}, {{1, 2, 1}, named(), {}}};

// Returns the status of `call`, with the error in `error`.
template <class Call>
int status_of(hsgd_error* error, Call&& call) {
  *error = {};
  return hsgd::guarded(error, call);
}

bool contains(const hsgd_error& error, const std::string& words) {
  const bool found = std::string(error.message).find(words) != std::string::npos;
  if (!found) std::fprintf(stderr, "%s\nlacks %s\n", error.message, words.c_str());
  return found;
}

void sum(hsgd::Communicator& comm, uint64_t count) {
  std::vector<double> data(count, 1.0);
  comm.allreduce(data.data(), data.data(), count, HSGD_FLOAT64, HSGD_SUM, nullptr);
}

}  // namespace

TEST("a rank that left is called by its name, and its own words stay as they are") {
  for (const Cluster& cluster : kClusters) {
    cluster.run([](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      sum(*comm, 3);
      if (rank == kLeaver) return comm->explain_leaving("raised Error: rank 0 and rank 2");
      hsgd_error error;
      CHECK_EQ(status_of(&error, [&] { sum(*comm, 3); }), HSGD_ERR_PEER_LOST);
      CHECK_EQ(error.rank, kNames[kLeaver]);
      CHECK(contains(error, "rank 7 (pid "));
      CHECK(contains(error, ") raised Error: rank 0 and rank 2"));
    });
  }
}

TEST("a rank that does not come in time is called by its name") {
  for (Cluster cluster : kClusters) {
    cluster.options = named(0.5);
    std::atomic<int> waiting{3};
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      if (rank == kLeaver) {
        while (waiting > 0) std::this_thread::yield();
        return;
      }
      hsgd_error error;
      CHECK_EQ(status_of(&error, [&] { sum(*comm, 3); }), HSGD_ERR_TIMEOUT);
      --waiting;
      CHECK_EQ(error.rank, kNames[kLeaver]);
      CHECK(contains(error, "rank 7"));
    });
  }
}

TEST("both sides of a mismatch, and roots, are called by their names") {
  for (const Cluster& cluster : kClusters) {
    cluster.run([](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      hsgd_error error;
      // The text that `words` makes of the two sides, of which one is the rank that differs.
      const auto check_sides = [&](const std::function<std::string(int one, int other)>& words) {
        const auto [one, other] = std::pair(error.sides[0].rank, error.sides[1].rank);
        CHECK(one != other && (one == kNames[kLeaver] || other == kNames[kLeaver]));
        CHECK_EQ(error.rank, other);
        CHECK(contains(error, words(one, other)));
      };
      CHECK_EQ(status_of(&error, [&] { sum(*comm, rank == kLeaver ? 4 : 3); }), HSGD_ERR_SIGNATURE);
      check_sides([](int one, int other) {
        return hsgd::text("rank %d sent %d float64, rank %d sent %d float64", one, one == 7 ? 4 : 3,
                          other, other == 7 ? 4 : 3);
      });

      double value = 0;
      const int root = rank == kLeaver ? 2 : 0;
      CHECK_EQ(status_of(&error, [&] { comm->broadcast(&value, 1, HSGD_FLOAT64, root, nullptr); }),
               HSGD_ERR_SIGNATURE);
      check_sides([](int one, int other) {
        return hsgd::text("rank %d called broadcast of 1 float64, root %d; rank %d called", one,
                          one == 7 ? 7 : 20, other);
      });

      const std::vector<uint64_t> receives(4, 1);
      std::vector<uint64_t> sends(4, 1);
      if (rank == kLeaver) sends[3] = 2;
      std::vector<double> in(5), out(4);
      const auto exchange = [&] {
        comm->alltoall(in.data(), sends.data(), out.data(), receives.data(), HSGD_FLOAT64, nullptr);
      };
      CHECK_EQ(status_of(&error, exchange), HSGD_ERR_SIGNATURE);
      check_sides([](int one, int other) {
        return hsgd::text("rank %d sends 2 float64 to rank %d, and rank %d expects 1", one, other,
                          other);
      });
    });
  }
}

TEST("a set-up that is refused calls the ranks by their names") {
  const hsgd_options late = named(0.3);
  const std::string path = ranks::meeting_point();
  ranks::run(2, [&](int rank) {
    hsgd_comm* comm = nullptr;
    hsgd_error error;
    CHECK_EQ(hsgd_comm_create_local(path.c_str(), rank, 3, &late, &comm, &error), HSGD_ERR_TIMEOUT);
    CHECK_EQ(error.rank, 7);
    CHECK(contains(error, "of 3 ranks, rank(s) 7 did not join"));
  });
  const hsgd_options options = named();
  ranks::run(2, [&](int rank) {
    hsgd_comm* comm = nullptr;
    hsgd_error error;
    CHECK_EQ(hsgd_comm_create_local(path.c_str(), rank, 2 + rank, &options, &comm, &error),
             HSGD_ERR_ARGUMENT);
    CHECK(contains(error, "rank 20 has size 2, rank 0 has size 3"));
  });
}

TEST("survivors keep their names; parts have those that they are given, or none") {
  const Cluster cluster{{4}, named(), {}};
  cluster.run([](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    constexpr int32_t kPartNames[] = {5, 6};
    hsgd_error error;
    for (const int32_t* names : {static_cast<const int32_t*>(nullptr), kPartNames}) {
      const auto part = hsgd::split(*comm, rank % 2, 0, names);
      const auto differ = [&] { sum(*part, static_cast<uint64_t>(3 + rank / 2)); };
      CHECK_EQ(status_of(&error, differ), HSGD_ERR_SIGNATURE);
      CHECK_EQ(error.sides[1].rank, names == nullptr ? 1 : 6);
    }
    sum(*comm, 3);
    if (rank == 1) return comm.reset();
    CHECK_EQ(status_of(&error, [&] { sum(*comm, 3); }), HSGD_ERR_PEER_LOST);
    const auto shrunk = comm->shrink(60);
    const auto differ = [&] { sum(*shrunk, rank == kLeaver ? 4 : 3); };
    CHECK_EQ(status_of(&error, differ), HSGD_ERR_SIGNATURE);
    CHECK(contains(error, "rank 20 sent 3 float64, rank 7 sent 4 float64"));
  });
}

TEST("windows call ranks by their names") {
  const Cluster cluster{{2}, named(), {}};
  cluster.run([](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    hsgd::NotifiedWindow::Settings settings{};
    settings.segment_bytes = settings.slots = 1;
    settings.timeout_s = 60;
    hsgd::NotifiedWindow window(*comm, settings, nullptr);
    if (rank == 0) return;
    hsgd_error error;
    CHECK_EQ(status_of(&error, [&] { window.put_notify({}, 0, 9, 1, 1); }), HSGD_ERR_ARGUMENT);
    CHECK(contains(error, "put_notify: slot 9 of rank 20:"));
    window.bind(0, 0);
    CHECK_EQ(status_of(&error, [&] { window.wait_any({{0, 0}}, 60); }), HSGD_ERR_PEER_LOST);
    CHECK_EQ(error.rank, 20);
    CHECK(contains(error, "rank 20 (pid "));
  });
}

TEST("names that are the ranks themselves need no table") {
  constexpr int32_t kSame[] = {0, 1, 2};
  CHECK(hsgd::RankNames(kSame, 3).data() == nullptr);
  CHECK_EQ(hsgd::RankNames(kSame, 3).rank_of(2), 2);
  CHECK_EQ(hsgd::RankNames(kNames, 4).of(3), 1);
  CHECK_EQ(hsgd::RankNames(kNames, 4).of(-1), -1);
  CHECK_EQ(hsgd::RankNames(kNames, 4).rank_of(7), 2);
  CHECK_EQ(hsgd::RankNames(kNames, 4).rank_of(2), -1);
}
