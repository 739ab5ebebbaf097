package stacktest

import (
	"strings"
	"sync"
)

// Buffer collects text, for example of a log, that one goroutine writes while another one reads it. The zero value is empty.
type Buffer struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write appends data. It returns no error.
func (b *Buffer) Write(data []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(data)
}

// String returns the text that has been written so far.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
