"""The drop-in torch samplers that run a recommendation, and the stream that makes batches as it is read.

A training imports only the one that it uses: `batchtune.BucketBatchSampler` and the others.
"""
