/* The sentences of each sample of BERT or T5, in Megatron-LM's order (build_mapping of
 * megatron/core/datasets/helpers.cpp). trainer/data/masked/sentence_mapping.py explains the order, and computes the
 * same without a compiler. */
#ifndef LLMCTL_SENTENCE_MAPPING_H
#define LLMCTL_SENTENCE_MAPPING_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* longest: usual target length of a sample in tokens, at least 2. one_in: one in this many samples, at most 2^32, has a
 * shorter target; 0: none. least: fewest sentences of a sample, at least 1. most_tokens: a document of several sentences
 * is skipped if a sentence has more tokens. num_samples: whole epochs are added until there are this many samples. */
struct llmctl_mapping_rules {
  int64_t longest, one_in, least, most_tokens, num_samples;
  uint64_t seed;
};

/* Returns the number N of samples. If rows is not NULL, also stores the shuffled rows [N, 3] (first sentence, one after
 * the last, target length), uint32_t, or int64_t where `is_wide`.
 *
 * documents: int64_t [entries], the first sentence of each document in the corpus, and the end of the last; ascending.
 * lengths: int32_t, tokens of the sentences from documents[0] on. Both may begin at any address. */
int64_t llmctl_sentence_mapping(const void *documents, int64_t entries, const void *lengths,
                                const struct llmctl_mapping_rules *rules, int is_wide, void *rows);

#ifdef __cplusplus
}
#endif

#endif
