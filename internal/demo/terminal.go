package demo

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/term"
)

// ctrlC is what the key sends while a terminal is raw.
const ctrlC = 3

// Terminal is where the user sits. Raw gives the keys one by one; Restore undoes that and may be called more than once,
// from any goroutine, also at the very end of the process.
type Terminal struct {
	in, out int
	read    func([]byte) (int, error)

	mu    sync.Mutex
	saved *term.State
	keys  chan byte
}

// OpenTerminal is the terminal of in and out, or nil if one of them is none.
func OpenTerminal(in, out any) *Terminal {
	i, ok := in.(*os.File)
	if !ok || !term.IsTerminal(int(i.Fd())) {
		return nil
	}
	o, ok := out.(*os.File)
	if !ok || !term.IsTerminal(int(o.Fd())) {
		return nil
	}
	return &Terminal{in: int(i.Fd()), out: int(o.Fd()), read: i.Read}
}

// Raw switches echo, line editing and the signals of keys off and returns the keys. The goroutine that reads them waits
// in the read until the process ends: there is no way to call a read of a terminal back.
func (t *Terminal) Raw() (<-chan byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	saved, err := term.MakeRaw(t.in)
	if err != nil {
		return nil, fmt.Errorf("setting the terminal up for keys: %w", err)
	}
	t.saved = saved
	if t.keys == nil {
		t.keys = make(chan byte, 16)
		go t.pump()
	}
	return t.keys, nil
}

func (t *Terminal) pump() {
	b := make([]byte, 1)
	for {
		n, err := t.read(b)
		if err != nil {
			return
		}
		if n == 1 {
			select {
			case t.keys <- b[0]:
			default: // nobody listens any more
			}
		}
	}
}

// Restore makes the terminal what it was.
func (t *Terminal) Restore() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.saved != nil {
		_ = term.Restore(t.in, t.saved)
		t.saved = nil
	}
}

// Width is the number of columns.
func (t *Terminal) Width() int {
	if w, _, err := term.GetSize(t.out); err == nil {
		return w
	}
	return 80
}
