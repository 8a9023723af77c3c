// Brings far tokens that suddenly matter from the archive: which, when, and on which thread.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ops_cpu/archive.h"

namespace kvq {

struct PromoterRule {
  int64_t cooldown;  // steps from one promotion of a KV head to its next, in every row
  int64_t budget;    // tokens of a row and layer that may be under way
  int64_t retries;   // how often a token that found no room is offered again
  float margin;      // by which a score has to exceed the near one
};

// By-products of attention to one layer: int32 and float32 [batch, kv_heads, count], float32
// [batch, kv_heads]. An index of -1 is none. Token i of a row is token start + i of the archive.
struct Candidates {
  const int32_t* index;
  const float* score;
  const float* near_score;
  const int32_t* start;  // null: 0 everywhere
  int64_t batch, kv_heads, count;
};

// One token of one head, on its way.
struct Promotion {
  enum State { kWaiting, kReady, kLost };

  int64_t head, token, start;  // token as in the archive, padding included
  float score;
  PinnedToken source;
  std::vector<uint8_t> data;         // the key, then the value
  std::atomic<int> state{kWaiting};  // stored with release when data is complete
};

struct ReadyToken {
  std::shared_ptr<Promotion> promotion;
  int64_t row;
};

// Calls come from any threads, those of one layer in the order of its steps.
class Promoter {
 public:
  Promoter(std::shared_ptr<Archive> archive, const PromoterRule& rule, bool synchronous);
  ~Promoter();
  Promoter(const Promoter&) = delete;
  Promoter& operator=(const Promoter&) = delete;

  const Archive& archive() const { return *archive_; }

  // One step of a layer. Throws std::out_of_range for tokens that the archive does not have, before
  // anything is accepted.
  void submit(int64_t layer, const Candidates& candidates);
  // What has arrived since the last call, in the order it was accepted.
  std::vector<ReadyToken> collect(int64_t layer);
  // Offers these of the last collected tokens again, by their place among them. After a
  // change of the layer's rows or tokens it does nothing.
  void retry(int64_t layer, const std::vector<int64_t>& places);
  // Waits until everything submitted has arrived.
  void wait();

 private:
  struct Entry {
    std::shared_ptr<Promotion> promotion;
    int64_t row, retries;
  };
  struct Choice {
    int64_t head, rank;
    float score;
  };
  struct Layer {
    int64_t step = 0, batch = 0, kv_heads = 0, change_count = 0;
    std::vector<int64_t> rests_until;  // [batch, kv_heads]: the step in which it may go on
    std::vector<Entry> under_way, collected;
  };

  bool follow(int64_t number, Layer& layer) const;
  std::vector<Choice> choose(const Layer& layer, const Candidates& candidates, int64_t row) const;
  bool accept(int64_t number, Layer& layer, const Candidates& candidates, int64_t row,
              const Choice& choice, int64_t token_bytes);
  void fetch(Promotion& promotion) const;
  void fetch_waiting();

  const std::shared_ptr<Archive> archive_;
  const PromoterRule rule_;
  const bool synchronous_;
  std::mutex calls_;  // guards layers_
  std::map<int64_t, Layer> layers_;
  std::mutex hand_over_;  // guards what follows
  std::condition_variable wake_, idle_;
  std::deque<std::shared_ptr<Promotion>> waiting_;
  int64_t unfinished_ = 0;
  bool stop_ = false;
  std::thread worker_;
};

}  // namespace kvq
