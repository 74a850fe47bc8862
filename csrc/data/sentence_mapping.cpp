#include "sentence_mapping.h"

#include <algorithm>
#include <random>

namespace {

/* Unaligned, because tables in a file may begin at any byte. */
using Place = int64_t __attribute__((aligned(1)));
using Length = int32_t __attribute__((aligned(1)));

/* The target number of tokens of each consecutive sample. */
class Targets {
 public:
  explicit Targets(const llmctl_mapping_rules &rules)
      : longest_(rules.longest), one_in_(rules.one_in), engine_(static_cast<uint32_t>(rules.seed)) {}

  int64_t next() {
    if (one_in_ == 0) return longest_;
    const int64_t drawn = static_cast<int64_t>(engine_());
    return drawn % one_in_ == 0 ? 2 + drawn % (longest_ - 1) : longest_;
  }

 private:
  int64_t longest_, one_in_;
  std::mt19937 engine_;
};

struct Tokens {
  int64_t all = 0;
  int32_t longest = 0;
};

/* Tokens of all sentences, and of the longest. Without an early exit, so that the loop is vectorised. */
Tokens tokens_of(const Length *lengths, int64_t count) {
  Tokens found;
  for (int64_t i = 0; i < count; ++i) {
    found.all += lengths[i];
    found.longest = std::max<int32_t>(found.longest, lengths[i]);
  }
  return found;
}

/* Samples before they are shuffled; `add` takes first sentence, end and target of each. */
template <typename Add>
int64_t join(const Place *documents, int64_t entries, const Length *lengths, const llmctl_mapping_rules &rules,
             const Add &add) {
  Targets targets(rules);
  int64_t made = 0;
  for (bool is_useful = true; is_useful && made < rules.num_samples;) {
    is_useful = false;
    for (int64_t document = 0; document + 1 < entries; ++document) {
      const int64_t first = documents[document], count = documents[document + 1] - first;
      const Length *const of_document = lengths + (first - documents[0]);
      if (count < rules.least) continue;
      const Tokens tokens_in = tokens_of(of_document, count);
      if (count > 1 && tokens_in.longest > rules.most_tokens) continue;
      is_useful = true;
      int64_t start = 0, tokens = 0, target = targets.next();
      if (tokens_in.all < target) {
        /* The same as below, without reading each sentence. */
        add(made++, first, first + count, target);
        targets.next();
        continue;
      }
      for (int64_t sentence = 1; sentence <= count; ++sentence) {
        tokens += of_document[sentence - 1];
        const int64_t left = count - sentence;
        /* Never leave a single sentence for a last sample. */
        const bool is_full = tokens >= target && left > 1 && sentence - start >= rules.least;
        if (!is_full && left > 0) continue;
        add(made++, first + start, first + sentence, target);
        start = sentence;
        tokens = 0;
        target = targets.next();
      }
    }
  }
  return made;
}

/* Durstenfeld's shuffle (doi:10.1145/364520.364540). */
template <typename Number>
void shuffle(Number (*rows)[3], int64_t count, uint64_t seed) {
  std::mt19937_64 engine(seed);
  /* Rows to swap with are far apart: they are prefetched while others are swapped. */
  constexpr int64_t kAhead = 64;
  int64_t others[kAhead];
  for (int64_t last = count - 1; last > 0;) {
    const int64_t steps = std::min(kAhead, last);
    for (int64_t i = 0; i < steps; ++i) {
      others[i] = static_cast<int64_t>(engine() % static_cast<uint64_t>(last - i + 1));
      __builtin_prefetch(rows[others[i]], 1);
    }
    for (int64_t i = 0; i < steps; ++i, --last) std::swap(rows[last], rows[others[i]]);
  }
}

template <typename Number>
int64_t mapping(const Place *documents, int64_t entries, const Length *lengths, const llmctl_mapping_rules &rules,
                Number (*rows)[3]) {
  const int64_t made = join(documents, entries, lengths, rules,
                            [rows](int64_t place, int64_t first, int64_t stop, int64_t target) {
                              rows[place][0] = static_cast<Number>(first);
                              rows[place][1] = static_cast<Number>(stop);
                              rows[place][2] = static_cast<Number>(target);
                            });
  shuffle(rows, made, rules.seed + 1);
  return made;
}

}  // namespace

extern "C" int64_t llmctl_sentence_mapping(const void *documents, int64_t entries, const void *lengths,
                                           const struct llmctl_mapping_rules *rules, int is_wide, void *rows) {
  const auto *const places = static_cast<const Place *>(documents);
  const auto *const tokens = static_cast<const Length *>(lengths);
  if (rows == nullptr) return join(places, entries, tokens, *rules, [](int64_t, int64_t, int64_t, int64_t) {});
  if (is_wide) return mapping(places, entries, tokens, *rules, static_cast<int64_t(*)[3]>(rows));
  return mapping(places, entries, tokens, *rules, static_cast<uint32_t(*)[3]>(rows));
}
