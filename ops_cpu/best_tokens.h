// The tokens with the greatest scores, greatest first, the smaller token first among equals.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

namespace kvq {

// Puts a token into lists of `size` places, ended by scores of -inf, unless it is there with a
// score as great; the last of the list falls out.
inline void insert_best(float* scores, int32_t* tokens, int size, float score, int32_t token) {
  const auto precedes = [&](int i) {
    return scores[i] > score || (scores[i] == score && tokens[i] < token);
  };
  int end = size - 1;
  for (int i = 0; i < size; ++i) {
    if (tokens[i] != token) continue;
    if (scores[i] >= score) return;
    end = i;
    break;
  }
  if (precedes(end)) return;
  for (; end > 0 && !precedes(end - 1); --end) {
    scores[end] = scores[end - 1];
    tokens[end] = tokens[end - 1];
  }
  scores[end] = score;
  tokens[end] = token;
}

// Those of one query row, offered in the order of the tokens, each once.
class BestTokens {
 public:
  void clear(int size) {
    size_ = size;
    for (int i = 0; i < size; ++i) {
      scores_[i] = -std::numeric_limits<float>::infinity();
      tokens_[i] = -1;
    }
  }

  // What a score has to be above.
  float least() const { return scores_[size_ - 1]; }

  void offer(float score, int32_t token) {
    if (!(score > least())) return;
    int at = size_ - 1;
    for (; at > 0 && scores_[at - 1] < score; --at) {
      scores_[at] = scores_[at - 1];
      tokens_[at] = tokens_[at - 1];
    }
    scores_[at] = score;
    tokens_[at] = token;
  }

  // The scores, then the bits of the tokens.
  void store(float* out) const {
    std::memcpy(out, scores_, sizeof(float) * size_);
    std::memcpy(out + size_, tokens_, sizeof(int32_t) * size_);
  }

 private:
  static constexpr int kMaxSize = 64;
  int size_ = 0;
  float scores_[kMaxSize];
  int32_t tokens_[kMaxSize];
};

}  // namespace kvq
