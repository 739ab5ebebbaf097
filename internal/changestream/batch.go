package changestream

import (
	"sync"

	"github.com/outrelay/outrelay/resume"
)

const (
	maxDocuments = 2000    // beyond it a reply only costs memory: 16 MB replies are no faster and cost 100 MB more
	targetBytes  = 4 << 20 // what a batch should weigh when documents are large

	firstDocuments = 256 // while their size is unknown
)

// Batch is one reply of the server. Docs alias the reply; Release gives the batch back, and with it the reply, so nothing
// that aliases it may be kept.
type Batch struct {
	Docs [][]byte
	// Position is the place behind the whole batch; its token is a copy of its own and may be kept. For a batch that ends with an
	// invalidate event it is the place before that event.
	Position resume.Position
	Bytes    int // of Docs
}

var batches = sync.Pool{New: func() any { return &Batch{Docs: make([][]byte, 0, maxDocuments)} }}

func newBatch() *Batch { return batches.Get().(*Batch) }

// Release ends the use of the batch. It must not be touched afterwards. A batch that is never released is collected like
// any other value.
func (b *Batch) Release() {
	b.reset()
	b.Position = resume.Position{}
	batches.Put(b)
}

func (b *Batch) reset() {
	clear(b.Docs) // or the pool would pin the reply
	b.Docs, b.Bytes = b.Docs[:0], 0
}

func (b *Batch) add(doc []byte) {
	b.Docs = append(b.Docs, doc)
	b.Bytes += len(doc)
}

// sizer chooses how many documents to ask for so that a batch stays near targetBytes: a decaying mean over documents of the
// last batches, so that one large document does not make small ones trickle for long.
type sizer struct{ docs, bytes float64 }

func (z *sizer) observe(docs, bytes int) {
	z.docs = z.docs*3/4 + float64(docs)
	z.bytes = z.bytes*3/4 + float64(bytes)
}

func (z *sizer) next(limit int) int32 {
	if z.bytes == 0 {
		return int32(min(limit, firstDocuments))
	}
	n := float64(targetBytes) * z.docs / z.bytes
	return int32(max(1, min(float64(limit), n)))
}
