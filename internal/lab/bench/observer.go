package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/retry"
)

const (
	scrapeEvery  = time.Second
	refreshEvery = 2 * time.Second // as the page does
)

// seen counts the responses to an observer.
type seen struct {
	scrapes, refreshes, messages int
}

// observer simulates a browser with the overview, a client of the live stream, and a Prometheus server.
type observer struct {
	relay  *relay
	client *http.Client
	group  *errgroup.Group
	stop   context.CancelFunc
	ended  <-chan struct{} // of the group's context: a simulation has failed, or all were stopped

	scrapes, refreshes, messages atomic.Int64
}

// startObserver starts the simulations. They begin when the relay responds.
func startObserver(ctx context.Context, relay *relay) *observer {
	ctx, stop := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4}}
	observer := &observer{relay: relay, client: client, group: group, stop: stop, ended: ctx.Done()}

	for _, f := range []func(context.Context) error{observer.scrapeMetrics, observer.refreshPage, observer.followLiveStream} {
		group.Go(func() error {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				return err
			}
			return nil
		})
	}

	return observer
}

// stopObserving blocks until each simulation has had a response, and then stops them. In a drain of few events, the
// first response may come after the drain.
func (o *observer) stopObserving(ctx context.Context) (seen, error) {
	responded := func() bool {
		return o.scrapes.Load() > 0 && o.refreshes.Load() > 0 && o.messages.Load() > 0
	}

	for began := time.Now(); !responded() && time.Since(began) < stall; {
		select {
		case <-o.ended:
			began = time.Time{}
		case <-time.After(slow):
		}
		if ctx.Err() != nil {
			break
		}
	}

	o.stop()
	err := o.group.Wait()
	o.client.CloseIdleConnections()

	seen := seen{int(o.scrapes.Load()), int(o.refreshes.Load()), int(o.messages.Load())}
	if err == nil && !responded() {
		err = fmt.Errorf("the relay did not respond to every kind of request: %+v", seen)
	}
	return seen, err
}

// sendGet sends one request. The caller must close the body.
func (o *observer) sendGet(ctx context.Context, address string, header ...string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	for pair := range slices.Chunk(header, 2) {
		req.Header.Set(pair[0], pair[1])
	}

	res, err := o.client.Do(req)
	if err != nil {
		return nil, err
	}

	if res.StatusCode != http.StatusOK {
		_ = res.Body.Close()
		return nil, fmt.Errorf("%s: %s", address, res.Status)
	}
	return res.Body, nil
}

// getAll sends one request and returns the whole body.
func (o *observer) getAll(ctx context.Context, address string, header ...string) ([]byte, error) {
	body, err := o.sendGet(ctx, address, header...)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// getWithRetries is sendGet for a process that has just been started.
func (o *observer) getWithRetries(ctx context.Context, address string, header ...string) (io.ReadCloser, error) {
	began := time.Now()
	for {
		body, err := o.sendGet(ctx, address, header...)
		if err == nil || ctx.Err() != nil || time.Since(began) > stall {
			return body, err
		}

		// A relay that has ended never responds.
		if err := o.relay.checkRunning(); err != nil {
			return nil, err
		}
		if err := retry.Sleep(ctx, slow); err != nil {
			return nil, err
		}
	}
}

// callEvery calls call at once and then every interval, until call fails or ctx ends.
func callEvery(ctx context.Context, interval time.Duration, call func() error) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if err := call(); err != nil {
			return err
		}

		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// openMetrics is the Accept header of Prometheus. It requests exemplars.
const openMetrics = "application/openmetrics-text;version=1.0.0;q=0.75," +
	"application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.25,*/*;q=0.1"

// scrapeMetrics simulates Prometheus.
func (o *observer) scrapeMetrics(ctx context.Context) error {
	address := "http://" + o.relay.http + "/metrics"
	body, err := o.getWithRetries(ctx, address, "Accept", openMetrics)
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, body)
	_ = body.Close()

	return callEvery(ctx, scrapeEvery, func() error {
		text, err := o.getAll(ctx, address, "Accept", openMetrics)
		if err == nil && !strings.HasSuffix(string(text), "# EOF\n") {
			err = fmt.Errorf("%s: incomplete OpenMetrics response", address)
		}
		if err == nil {
			o.scrapes.Add(1)
		}
		return err
	})
}

var asset = regexp.MustCompile(`(?:href|src)="(/static/[^"]+)"`)

// refreshPage simulates a browser with the overview: the document, its assets, and then a refresh as often as
// its script.
func (o *observer) refreshPage(ctx context.Context) error {
	base := "http://" + o.relay.page
	body, err := o.getWithRetries(ctx, base+"/")
	if err != nil {
		return err
	}

	text, err := io.ReadAll(body)
	_ = body.Close()
	if err != nil {
		return err
	}

	parts := asset.FindAllSubmatch(text, -1)
	if len(parts) == 0 {
		return fmt.Errorf("%s has no page", base)
	}
	for _, p := range parts {
		if _, err := o.getAll(ctx, base+strings.ReplaceAll(string(p[1]), "&amp;", "&")); err != nil {
			return err
		}
	}

	return callEvery(ctx, refreshEvery, func() error {
		_, err := o.getAll(ctx, base+"/", "HX-Request", "true", "HX-Target", "live")
		if err == nil {
			o.refreshes.Add(1)
		}
		return err
	})
}

// followLiveStream simulates a client of the live stream.
func (o *observer) followLiveStream(ctx context.Context) error {
	body, err := o.getWithRetries(ctx, "http://"+o.relay.page+"/api/v1/live", "Accept", "text/event-stream")
	if err != nil {
		return err
	}
	defer body.Close()

	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "data:") {
			o.messages.Add(1)
		}
	}

	if err := lines.Err(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}
