package demo

import (
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// delayProxy is a proxy that delays all bytes to and from a server. It does not limit the
// throughput.
type delayProxy struct {
	listener net.Listener
	target   string
	delay    time.Duration // one way
	wg       sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

func newDelayProxy(target string, delay time.Duration) (*delayProxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &delayProxy{listener: l, target: target, delay: delay, conns: map[net.Conn]struct{}{}}
	p.wg.Go(p.acceptLoop)
	return p, nil
}

func (p *delayProxy) listenAddress() string { return p.listener.Addr().String() }

// closeAll closes every connection and blocks until their goroutines have ended.
func (p *delayProxy) closeAll() {
	_ = p.listener.Close() // it was open

	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close() // it was open
	}
	p.mu.Unlock()

	p.wg.Wait()
}

func (p *delayProxy) acceptLoop() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			// The client notices that its connection is closed.
			_ = client.Close()
			continue
		}

		if !p.addConnections(client, server) {
			return
		}
		p.wg.Go(func() { p.copyDelayed(client, server) })
		p.wg.Go(func() { p.copyDelayed(server, client) })
	}
}

// addConnections registers connections for closeAll. It closes them and returns false if closeAll
// was called before.
func (p *delayProxy) addConnections(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	for _, c := range conns {
		if p.closed {
			_ = c.Close() // it was never used
		} else {
			p.conns[c] = struct{}{}
		}
	}
	return !p.closed
}

// delayedBytes are bytes that were read, and the time at which they are written.
type delayedBytes struct {
	bytes []byte
	at    time.Time
}

// copyDelayed copies bytes until one of the connections ends.
func (p *delayProxy) copyDelayed(from, to net.Conn) {
	queue := make(chan delayedBytes, 4096)
	p.wg.Go(func() {
		defer from.Close()
		defer to.Close()
		for x := range queue {
			time.Sleep(time.Until(x.at))
			if _, err := to.Write(x.bytes); err != nil {
				break
			}
		}

		// After a failed write, the reader must not block on the queue.
		for range queue {
		}
	})

	defer close(queue)
	for {
		b := make([]byte, 64<<10)
		n, err := from.Read(b)
		if n > 0 {
			queue <- delayedBytes{b[:n], time.Now().Add(p.delay)}
		}
		if err != nil {
			// A connection that was broken off must be broken off on the other side too.
			if !errors.Is(err, io.EOF) {
				_ = to.Close()
			}
			return
		}
	}
}
