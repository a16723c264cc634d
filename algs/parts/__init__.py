"""What several methods share: clipped surrogates, aggregation, KL estimators, preference log-ratios."""
