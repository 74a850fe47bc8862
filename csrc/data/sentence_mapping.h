/* The sentences of each sample of BERT or T5, in Megatron-LM's order (build_mapping of
 * megatron/core/datasets/helpers.cpp). trainer/data/masked/sentence_mapping.py explains the order, and computes the
 * same without a compiler. */
#ifndef LLMCTL_SENTENCE_MAPPING_H
#define LLMCTL_SENTENCE_MAPPING_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* longest: tokens that a sample aims at, at least 2. one_in: of so many samples one aims at fewer, at most 2^32; 0: none.
 * least: a sample has no fewer sentences, at least 1. most_tokens: a document of several sentences is left out if one of
 * them has more. num_samples: whole epochs are added until there are so many. */
struct llmctl_mapping_rules {
  int64_t longest, one_in, least, most_tokens, num_samples;
  uint64_t seed;
};

/* Number N of the samples; where rows is not NULL, also the shuffled rows [N, 3] (first sentence, one after the last,
 * tokens aimed at), uint32_t, or int64_t where `is_wide`.
 *
 * documents: int64_t [entries], where in the corpus each document begins, and where the last one ends; ascending. lengths:
 * int32_t, tokens of the sentences from documents[0] on. Both may begin at any address. */
int64_t llmctl_sentence_mapping(const void *documents, int64_t entries, const void *lengths,
                                const struct llmctl_mapping_rules *rules, int is_wide, void *rows);

#ifdef __cplusplus
}
#endif

#endif
