package changestream

const (
	// targetBytes is the size that a batch of large documents should have. The driver allocates a buffer for each response, and two or
	// three of them are alive at a time. Batches of half this size cost 7 % of the rate.
	targetBytes = 2 << 20

	// firstDocuments is the number of documents to request while their size is unknown.
	firstDocuments = 256
)

// batchSizer chooses the number of documents to request, so that a batch stays near targetBytes. It
// uses a decaying mean of the document sizes in the last batches, so one large document does not
// reduce the batches of small documents for long.
type batchSizer struct{ docs, bytes float64 }

func (z *batchSizer) observeResponse(docs, bytes int) {
	z.docs = z.docs*3/4 + float64(docs)
	z.bytes = z.bytes*3/4 + float64(bytes)
}

func (z *batchSizer) nextBatchSize(limit int) int32 {
	if z.bytes == 0 {
		return int32(min(limit, firstDocuments))
	}

	n := float64(targetBytes) * z.docs / z.bytes
	return int32(max(1, min(float64(limit), n)))
}
