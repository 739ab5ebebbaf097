package kafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/metrics"
)

// metaTimeout bounds one request for metadata where others can be asked: a broker that hangs must not hide what they know.
const metaTimeout = 1500 * time.Millisecond

// perItem is the time that a request gets for each topic or partition in it, beside its least.
const perItem = time.Millisecond

func sized(least time.Duration, items int) time.Duration {
	return least + time.Duration(items)*perItem
}

// connectSlack is what one of several brokers gets to accept a connection.
const connectSlack = 500 * time.Millisecond

// Client talks to one cluster. It is safe for concurrent use.
type Client struct {
	cfg       Config
	codec     *batch.Codec
	links     *links
	transport *kafkago.Transport
	fence     *fence.Client
	layout    atomic.Pointer[Layout]
	// patience is the least that a request gets, and the steps of a take-over; for tests, which call no server sick that is slow.
	patience time.Duration

	reopenEvery time.Duration // but for tests the constant of this name
	reopened    atomic.Int64  // Unix nanoseconds of when a sink last ended of its own accord
}

// NewClient makes a client. It does no I/O.
func NewClient(cfg Config) (*Client, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	codec, err := batch.ParseCodec(cfg.Compression)
	if err != nil {
		return nil, err
	}
	c := &Client{cfg: cfg, codec: codec, links: &links{}, reopenEvery: reopenEvery}
	// The transport asks for the layout every few seconds. It routes by brokers and coordinators alone, so it needs no topic.
	c.transport = &kafkago.Transport{
		MetadataTopics: []string{},
		Dial:           c.open, DialTimeout: dialTimeout, IdleTimeout: linkIdle, MetadataTTL: 5 * time.Second, ClientID: cfg.ClientID,
	}
	if cfg.SASL != nil {
		c.transport.SASL = cfg.SASL
	}
	c.fence = &fence.Client{
		Kafka:     &kafkago.Client{Addr: kafkago.TCP(cfg.Brokers...), Transport: c.transport},
		Transport: c.transport,
	}
	c.layout.Store(&Layout{})
	return c, nil
}

// For is a client of the same cluster with the same connections that reports elsewhere, and whose records share that much memory:
// one for each slot of a watcher (N28). Only the first one is to be closed.
func (c *Client) For(log *slog.Logger, m *metrics.Set, parkBytes int64) *Client {
	of := &Client{cfg: c.cfg, codec: c.codec, links: c.links, transport: c.transport, fence: c.fence, patience: c.patience, reopenEvery: c.reopenEvery}
	of.cfg.Log, of.cfg.Metrics, of.cfg.ParkBytes = log, metrics.OrNew(m), parkBytes
	of.layout.Store(c.layout.Load())
	return of
}

// Close closes idle connections. Those in use end with their request.
func (c *Client) Close() {
	c.links.close()
	c.transport.CloseIdleConnections()
}

// call sends one request to a broker by address, over an idle connection if there is one. A connection that died while
// it was idle is replaced once: the broker has closed it for its own reasons.
func (c *Client) call(ctx context.Context, addr string, timeout time.Duration, req protocol.Message) (protocol.Message, error) {
	timeout = max(timeout, c.patience)
	if l := c.links.take(addr); l != nil {
		m, err := l.roundTrip(ctx, timeout, req)
		if err == nil {
			c.links.give(l)
			return m, nil
		}
		l.close()
		if ctx.Err() != nil || isTimeout(err) {
			return nil, err
		}
	}
	l, err := c.dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	m, err := l.roundTrip(ctx, timeout, req)
	if err != nil {
		l.close()
		return nil, fmt.Errorf("asking %s: %w", addr, err)
	}
	c.links.give(l)
	return m, nil
}

func isTimeout(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && t.Timeout()
}

// any asks one broker after another, those of the last layout and the configured ones, until one answers. The last one may take
// [adminTimeout]: nobody is left who would know, and a cluster that is slow is one that works.
func (c *Client) any(ctx context.Context, timeout time.Duration, req func() protocol.Message) (protocol.Message, error) {
	var errs []error
	candidates := c.candidates()
	for i, addr := range candidates {
		if i == len(candidates)-1 {
			timeout = max(timeout, adminTimeout)
		}
		try, cancel := context.WithTimeout(ctx, max(timeout, c.patience)+connectSlack)
		m, err := c.call(try, addr, timeout, req())
		cancel()
		if err == nil {
			return m, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
		c.links.doubt(addr)
	}
	return nil, errors.Join(errs...)
}

// candidates are all known addresses in random order: a broker that is cut off from the others would go on naming itself as a
// leader if it were always the one that is asked. Brokers that failed lately come last.
func (c *Client) candidates() []string {
	var list []string
	for _, b := range c.layout.Load().Brokers {
		list = append(list, b)
	}
	for _, b := range c.cfg.Brokers {
		if !slices.Contains(list, b) {
			list = append(list, b)
		}
	}
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	trusted, doubted := c.links.partition(list)
	return append(trusted, doubted...)
}

// String names the cluster in messages.
func (c *Client) String() string { return strings.Join(c.cfg.Brokers, ",") }
