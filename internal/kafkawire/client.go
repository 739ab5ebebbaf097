package kafkawire

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
)

const (
	// metaTimeout bounds one metadata request while other brokers are left to try. A broker that
	// hangs must not delay the response of the others.
	metaTimeout = 1500 * time.Millisecond

	// perItem is added to the timeout of a request for each topic or partition in it.
	perItem = time.Millisecond

	// connectSlack is the time that one of several brokers gets to accept a connection.
	connectSlack = 500 * time.Millisecond
)

// timeoutFor returns the timeout of a request for a number of topics or partitions.
func timeoutFor(least time.Duration, items int) time.Duration {
	return least + time.Duration(items)*perItem
}

// Client talks to one cluster. It is safe for concurrent use.
type Client struct {
	cfg       Config
	links     *linkPool
	transport *kafkago.Transport
	layout    atomic.Pointer[Layout]
}

// NewClient returns a client. It does no I/O.
func NewClient(cfg Config) (*Client, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}

	c := &Client{cfg: cfg, links: &linkPool{}}
	c.transport = &kafkago.Transport{
		Dial:        c.dialTransport,
		DialTimeout: dialTimeout,
		IdleTimeout: linkIdle,
		MetadataTTL: 5 * time.Second,
		// The transport reads metadata every few seconds. It routes only by brokers and coordinators,
		// so it needs no topic.
		MetadataTopics: []string{},
		ClientID:       cfg.ClientID,
	}

	// A nil *SASL in the interface would not compare equal to nil.
	if cfg.SASL != nil {
		c.transport.SASL = cfg.SASL
	}
	c.layout.Store(&Layout{})
	return c, nil
}

// Close closes idle connections. Other connections are closed when their request ends.
func (c *Client) Close() {
	c.links.closeAll()
	c.transport.CloseIdleConnections()
}

// callBroker sends one request to the broker at addr and returns the response. It uses an idle
// connection if there is one. If that connection fails, the broker may have closed it while it was
// idle, so the request is sent once more over a new connection.
func (c *Client) callBroker(
	ctx context.Context, addr string, timeout time.Duration, req protocol.Message,
) (protocol.Message, error) {
	timeout = max(timeout, c.cfg.Patience)
	if l := c.links.takeIdle(addr); l != nil {
		m, err := l.roundTrip(ctx, timeout, req)
		if err == nil {
			c.links.putIdle(l)
			return m, nil
		}
		l.Close()
		if ctx.Err() != nil || isTimeout(err) {
			return nil, err
		}
	}

	l, err := c.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	m, err := l.roundTrip(ctx, timeout, req)
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("calling %s: %w", addr, err)
	}
	c.links.putIdle(l)
	return m, nil
}

func isTimeout(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && t.Timeout()
}

// callAny sends a request to one broker after another until one responds. The candidates are the
// brokers of the last layout and the configured brokers. The last candidate gets at least
// [adminTimeout]: there is no other broker to try, and a slow broker may still respond.
func (c *Client) callAny(
	ctx context.Context, timeout time.Duration, newRequest func() protocol.Message,
) (protocol.Message, error) {
	var errs []error
	candidates := c.brokerCandidates()
	for i, addr := range candidates {
		if i == len(candidates)-1 {
			timeout = max(timeout, adminTimeout)
		}

		callCtx, cancel := context.WithTimeout(ctx, max(timeout, c.cfg.Patience)+connectSlack)
		m, err := c.callBroker(callCtx, addr, timeout, newRequest())
		cancel()
		if err == nil {
			return m, nil
		}

		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
		c.links.markFailed(addr)
	}
	return nil, errors.Join(errs...)
}

// brokerCandidates returns all known addresses in random order, brokers that failed lately last. The
// order is random because a broker that is cut off from the others continues to name itself as a
// leader. If it were always the first, its metadata would always be used.
func (c *Client) brokerCandidates() []string {
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
	healthy, failed := c.links.splitByFailure(list)
	return append(healthy, failed...)
}

// String returns the configured brokers. It names the cluster in messages.
func (c *Client) String() string { return strings.Join(c.cfg.Brokers, ",") }

// Brokers returns the configured brokers.
func (c *Client) Brokers() []string { return c.cfg.Brokers }

// Transport returns the transport of kafka-go that serves transactional requests.
func (c *Client) Transport() *kafkago.Transport { return c.transport }

// Layout returns the layout that a broker returned last. It is not nil.
func (c *Client) Layout() *Layout { return c.layout.Load() }

// MarkFailed notes that the broker at addr failed, so that it becomes the last candidate for requests
// that any broker can serve.
func (c *Client) MarkFailed(addr string) { c.links.markFailed(addr) }
