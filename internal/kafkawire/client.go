package kafkawire

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"time"

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
	cfg    Config
	links  *linkPool
	layout atomic.Pointer[Layout]
	outage atomic.Pointer[error] // see Outage

	transactionTimeout atomic.Int64 // nanoseconds, as low as the cluster requires
}

// NewClient returns a client. It does no I/O. The error joins all invalid settings.
func NewClient(cfg Config) (*Client, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	client := &Client{cfg: cfg, links: &linkPool{perBroker: cfg.IdleLinks}}
	client.layout.Store(&Layout{})
	client.transactionTimeout.Store(int64(cfg.TransactionTimeout))
	return client, nil
}

// Close closes idle connections. Other connections are closed when their request ends.
func (c *Client) Close() { c.links.closeAll() }

// callBroker sends one request to the broker at addr and returns the response.
func (c *Client) callBroker(
	ctx context.Context, addr string, timeout time.Duration, req protocol.Message,
) (message protocol.Message, err error) {
	err = c.useLink(ctx, addr, timeout, func(link *Link) error {
		message, err = link.protoConn.RoundTrip(req)
		return err
	})
	return message, err
}

// useLink calls exchange, which sends one request and reads the response, with a link to the broker at
// addr. It uses an idle link if there is one. If that link fails, the broker may have closed it while
// it was idle, so exchange is called once more with a new link.
func (c *Client) useLink(ctx context.Context, addr string, timeout time.Duration, exchange func(link *Link) error) error {
	return c.useLinkWithin(ctx, addr, dialTimeout, timeout, exchange)
}

// useLinkWithin is useLink with a limit for the time to connect, before the request.
func (c *Client) useLinkWithin(
	ctx context.Context, addr string, connect, timeout time.Duration, exchange func(link *Link) error,
) error {
	timeout = max(timeout, c.cfg.Patience)
	if link := c.links.takeIdle(addr); link != nil {
		err := link.exchange(ctx, timeout, exchange)
		if err == nil {
			c.links.putIdle(link)
			return nil
		}
		link.Close()
		// A timeout does not mean that the broker has closed the link: it may still work on the request.
		if ctx.Err() != nil || isTimeout(err) {
			return err
		}
	}

	dialCtx, cancel := context.WithTimeout(ctx, max(connect, c.cfg.Patience))
	link, err := c.Dial(dialCtx, addr)
	cancel()
	if err != nil {
		return err
	}
	if err := link.exchange(ctx, timeout, exchange); err != nil {
		link.Close()
		return fmt.Errorf("calling %s: %w", addr, err)
	}
	c.links.putIdle(link)
	return nil
}

func isTimeout(err error) bool {
	netErr, ok := errors.AsType[net.Error](err)
	return ok && netErr.Timeout()
}

// callAny sends a request to one broker after another until one responds.
func (c *Client) callAny(
	ctx context.Context, timeout time.Duration, req protocol.Message,
) (message protocol.Message, err error) {
	err = c.useAny(ctx, timeout, func(link *Link) error {
		message, err = link.protoConn.RoundTrip(req)
		return err
	})
	return message, err
}

// ErrAway is the error of a request that any broker can serve, if none has served it.
var ErrAway = errors.New("no broker of Kafka can be used")

// useAny calls exchange with a link to one broker after another until it succeeds. The candidates are
// the brokers of the last layout and the configured brokers. The last candidate gets at least
// [adminTimeout]: there is no other broker to try, and a slow broker may still respond.
func (c *Client) useAny(ctx context.Context, timeout time.Duration, exchange func(link *Link) error) error {
	var errs []error
	candidates := c.brokerCandidates()
	for i, addr := range candidates {
		if i == len(candidates)-1 {
			timeout = max(timeout, adminTimeout)
		}

		err := c.useLinkWithin(ctx, addr, timeout+connectSlack, timeout, exchange)
		if err == nil {
			return nil
		}

		errs = append(errs, err)
		// The end of ctx is no evidence about the broker.
		if ctx.Err() != nil {
			break
		}
		c.links.markFailed(addr)
	}
	return fmt.Errorf("%w: %w", ErrAway, errors.Join(errs...))
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

// CloseIdle closes idle connections. The client can be used again.
func (c *Client) CloseIdle() { c.links.closeIdle() }

// Layout returns the layout that a broker returned last. It is not nil.
func (c *Client) Layout() *Layout { return c.layout.Load() }

// MarkFailed notes that the broker at addr failed, so that it becomes the last candidate for requests
// that any broker can serve.
func (c *Client) MarkFailed(addr string) { c.links.markFailed(addr) }

// NoteThrottle notes that a quota keeps the broker at addr from being used for duration. Nothing enforces that: callers call
// Throttled before requests that count for the quota.
func (c *Client) NoteThrottle(addr string, duration time.Duration) {
	c.links.noteThrottle(addr, duration)
}

// Throttled returns how long a quota keeps the broker at addr from being used.
func (c *Client) Throttled(addr string) time.Duration { return c.links.throttledFor(addr) }

// ClientID returns the name that brokers use for this client.
func (c *Client) ClientID() string { return c.cfg.ClientID }
