"""The kinds of streams: pipelines, mixtures and Grain chains."""
