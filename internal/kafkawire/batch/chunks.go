package batch

import (
	"math/bits"
	"sync"
)

const (
	minChunkBits = 9  // log2 of the smallest chunk, 512 bytes: 60,000 partitions may wait with one small record each
	maxChunkBits = 15 // log2 of the largest chunk, 32 KiB
	chunkClasses = maxChunkBits - minChunkBits + 1
)

// Chunks is the memory that batches share: a free list of chunks, which are small at the start of a batch and then
// all of one size. A chunk that a batch has released serves any other batch. The zero value is ready for use. It is safe
// for concurrent use.
type Chunks struct {
	mu      sync.Mutex
	free    [chunkClasses][][]byte
	minFree [chunkClasses]int // smallest number of free chunks since the last trim: these were unused
}

// takeChunk returns an empty chunk for a batch that has n chunks. It is as large as the others together, up to the largest
// chunk. So a batch holds at most twice the memory of its records, or one small chunk.
func (c *Chunks) takeChunk(n int) []byte {
	class := min(max(n-1, 0), chunkClasses-1)
	c.mu.Lock()
	defer c.mu.Unlock()

	if free := len(c.free[class]); free > 0 {
		chunk := c.free[class][free-1]
		c.free[class][free-1] = nil
		c.free[class] = c.free[class][:free-1]
		c.minFree[class] = min(c.minFree[class], free-1)
		return chunk
	}

	// The list was empty, so none of its chunks was unused.
	c.minFree[class] = 0
	return make([]byte, 0, 1<<(class+minChunkBits))
}

// putChunks adds the chunks of a batch to the free list.
func (c *Chunks) putChunks(chunks [][]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, chunk := range chunks {
		class := bits.Len(uint(cap(chunk))) - 1 - minChunkBits
		c.free[class] = append(c.free[class], chunk[:0])
	}
}

// TrimUnused drops half of the free chunks of each size that were not used since the last call, but at least one of
// them.
func (c *Chunks) TrimUnused() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for class := range c.free {
		drop := min((c.minFree[class]+1)/2, len(c.free[class]))
		keep := len(c.free[class]) - drop
		clear(c.free[class][keep:])
		c.free[class] = c.free[class][:keep]
		c.minFree[class] = keep
	}
}
