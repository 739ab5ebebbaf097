package demo

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/term"
)

// ctrlC is the byte that Ctrl-C sends in raw mode.
const ctrlC = 3

// Terminal is the terminal of the user. Raw switches it to single keys. Restore undoes that.
// Restore may be called several times, from any goroutine, and at the very end of the process.
type Terminal struct {
	in, out int
	read    func([]byte) (int, error)

	mu    sync.Mutex
	saved *term.State
	keys  chan byte
}

// OpenTerminal returns the terminal of input and output, or nil if one of them is not a terminal.
func OpenTerminal(input, output any) *Terminal {
	i, ok := input.(*os.File)
	if !ok || !term.IsTerminal(int(i.Fd())) {
		return nil
	}
	file, ok := output.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) {
		return nil
	}
	return &Terminal{in: int(i.Fd()), out: int(file.Fd()), read: i.Read}
}

// Raw switches echo, line editing and the signals of keys off, and returns the keys. The goroutine
// that reads them blocks until the process ends, because the read of a terminal cannot be
// interrupted.
func (t *Terminal) Raw() (<-chan byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()

	saved, err := term.MakeRaw(t.in)
	if err != nil {
		return nil, fmt.Errorf("switching the terminal to single keys: %w", err)
	}
	t.saved = saved
	if t.keys == nil {
		t.keys = make(chan byte, 16)
		go t.readKeys()
	}
	return t.keys, nil
}

func (t *Terminal) readKeys() {
	key := make([]byte, 1)
	for {
		n, err := t.read(key)
		if err != nil {
			return
		}
		if n != 1 {
			continue
		}

		// A key is dropped if the demo no longer reads keys.
		select {
		case t.keys <- key[0]:
		default:
		}
	}
}

// Restore restores the terminal's state before Raw.
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

// Width returns the number of columns.
func (t *Terminal) Width() int {
	if width, _, err := term.GetSize(t.out); err == nil {
		return width
	}
	return 80
}
