package bench

import (
	"strings"
	"sync"
)

// tail keeps the end of the output of a process.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailBytes = 3000

// Write implements io.Writer.
func (t *tail) Write(data []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, data...)
	if n := len(t.b) - tailBytes; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(data), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if text := strings.TrimSpace(string(t.b)); text != "" {
		return text
	}
	return "(none)"
}
