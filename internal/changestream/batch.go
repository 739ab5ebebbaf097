package changestream

import (
	"sync"

	"github.com/outrelay/outrelay/resume"
)

const (
	// MaxDocuments limits a batch. Larger replies only cost memory: replies of 16 MB are no faster
	// and need 100 MB more.
	MaxDocuments = 2000

	// targetBytes is the size that a batch of large documents should have.
	targetBytes = 4 << 20

	// firstDocuments is the number of documents to request while their size is unknown.
	firstDocuments = 256
)

// Batch is one reply of the server. Docs alias the reply. Release returns the batch to the pool, and
// frees the reply, so the caller must copy everything that it keeps longer.
type Batch struct {
	Docs [][]byte

	// Position is the position after the whole batch. Its token is a copy that the caller may keep.
	// If the batch ends with an invalidate event, Position is the position before that event.
	Position resume.Position

	// Bytes is the total size of Docs.
	Bytes int
}

var batchPool = sync.Pool{New: func() any { return &Batch{Docs: make([][]byte, 0, MaxDocuments)} }}

func newBatch() *Batch { return batchPool.Get().(*Batch) }

// Release ends the use of the batch. The caller must not use the batch afterwards. The garbage
// collector frees a batch that is never released.
func (b *Batch) Release() {
	b.clearDocuments()
	b.Position = resume.Position{}
	batchPool.Put(b)
}

func (b *Batch) clearDocuments() {
	// Without the clear, the pool would keep the reply in memory.
	clear(b.Docs)
	b.Docs, b.Bytes = b.Docs[:0], 0
}

func (b *Batch) appendDocument(doc []byte) {
	b.Docs = append(b.Docs, doc)
	b.Bytes += len(doc)
}

// batchSizer chooses the number of documents to request, so that a batch stays near targetBytes. It
// uses a decaying mean of the document sizes in the last batches, so one large document does not
// reduce the batches of small documents for long.
type batchSizer struct{ docs, bytes float64 }

func (z *batchSizer) observeReply(docs, bytes int) {
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
