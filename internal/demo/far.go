package demo

import (
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// far is a way to a server that is some time away: a proxy that brings everything later, and as fast as it comes.
type far struct {
	listener net.Listener
	to       string
	delay    time.Duration // one way
	wg       sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

func newFar(to string, delay time.Duration) (*far, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	f := &far{listener: l, to: to, delay: delay, conns: map[net.Conn]struct{}{}}
	f.wg.Go(f.accept)
	return f, nil
}

func (f *far) address() string { return f.listener.Addr().String() }

// close ends every connection and waits for what serves it.
func (f *far) close() {
	_ = f.listener.Close() // it was open
	f.mu.Lock()
	f.closed = true
	for c := range f.conns {
		_ = c.Close() // likewise
	}
	f.mu.Unlock()
	f.wg.Wait()
}

func (f *far) accept() {
	for {
		here, err := f.listener.Accept()
		if err != nil {
			return
		}
		there, err := net.Dial("tcp", f.to)
		if err != nil {
			_ = here.Close() // whoever asked sees that
			continue
		}
		if !f.keep(here, there) {
			return
		}
		f.wg.Go(func() { f.bring(here, there) })
		f.wg.Go(func() { f.bring(there, here) })
	}
}

// keep remembers connections for close; false if that has been.
func (f *far) keep(conns ...net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range conns {
		if f.closed {
			_ = c.Close() // it was never used
		} else {
			f.conns[c] = struct{}{}
		}
	}
	return !f.closed
}

// late is what was read, and when it is to arrive.
type late struct {
	bytes []byte
	at    time.Time
}

// bring copies from one to the other until either ends.
func (f *far) bring(from, to net.Conn) {
	way := make(chan late, 4096)
	f.wg.Go(func() {
		defer from.Close()
		defer to.Close()
		for x := range way {
			time.Sleep(time.Until(x.at))
			if _, err := to.Write(x.bytes); err != nil {
				break
			}
		}
		for range way { // until the reader has seen that it is over
		}
	})
	defer close(way)
	for {
		b := make([]byte, 64<<10)
		n, err := from.Read(b)
		if n > 0 {
			way <- late{b[:n], time.Now().Add(f.delay)}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				_ = to.Close() // it was broken off, and is to be on the other side
			}
			return
		}
	}
}
