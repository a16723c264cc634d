"""This room holds the parts that several methods share: clipped surrogates, aggregation, KL, preference log-ratios."""
