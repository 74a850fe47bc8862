"""Evaluation of a trained model in any layout: perplexity of a text, and tasks of lm-evaluation-harness."""
