package changes

import (
	"sync"

	"github.com/outrelay/outrelay/resume"
)

// MaxDocuments limits a batch. Larger responses only cost memory: responses of 16 MB are no faster
// and need 100 MB more.
const MaxDocuments = 2000

// Batch is one response of the server. Docs alias the response. Release returns the batch to the pool, and
// frees the response, so the caller must copy everything that it keeps longer.
type Batch struct {
	Docs [][]byte

	// Position is the position after the whole batch. Its token is a copy that the caller may keep.
	// If the batch ends with an invalidate event, Position is the position before that event.
	Position resume.Position

	// Bytes is the total size of Docs.
	Bytes int
}

var batchPool = sync.Pool{New: func() any { return &Batch{Docs: make([][]byte, 0, MaxDocuments)} }}

// NewBatch returns an empty batch, from the pool if that has one.
func NewBatch() *Batch { return batchPool.Get().(*Batch) }

// Release ends the use of the batch. The caller must not use the batch afterwards. The garbage
// collector frees a batch that is never released.
func (b *Batch) Release() {
	b.Clear()
	b.Position = resume.Position{}
	batchPool.Put(b)
}

// Clear removes the documents, and keeps the position.
func (b *Batch) Clear() {
	// Without the clear, the pool would keep the response in memory.
	clear(b.Docs)
	b.Docs, b.Bytes = b.Docs[:0], 0
}

// Append adds a document, which the batch does not copy.
func (b *Batch) Append(doc []byte) {
	b.Docs = append(b.Docs, doc)
	b.Bytes += len(doc)
}
