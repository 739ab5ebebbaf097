package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// On the whole the pace keeps the rate; times never go back, and there are bursts.
func TestPaceKeepsTheRate(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.IntRange(1, 5000).Draw(t, "rate")
		n := rapid.IntRange(0, 20*rate).Draw(t, "n")
		at, next := dueAfterStart(n, rate), dueAfterStart(n+1, rate)
		if next < at {
			t.Fatalf("event %d is due at %v, the next at %v", n, at, next)
		}
		even := time.Duration(n) * time.Second / time.Duration(rate)
		if off := (at - even).Abs(); off > time.Duration(float64(burstEvery)*burstShare)+2*time.Second/time.Duration(rate) {
			t.Fatalf("event %d at %d/s is due at %v, which is %v off", n, rate, at, off)
		}
	})

	together := 0
	for n := range 2000 {
		if dueAfterStart(n, 400) == burstEvery {
			together++
		}
	}

	if together != 100 {
		t.Errorf("a burst of %d events", together)
	}
}

func TestPaceWaits(t *testing.T) {
	t.Parallel()
	p, extra, more := pace{rate: 1000}, 0, make(chan int, 1)
	more <- 5
	began := time.Now()
	for range 100 {
		if !p.waitNext(t.Context(), more, &extra) {
			t.Fatal("ended")
		}
	}

	if d := time.Since(began); d < 80*time.Millisecond {
		t.Errorf("100 events at 1000/s took %v", d)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p.waitNext(ctx, more, &extra) {
		t.Error("goes on after the end")
	}
}

// Without a rate the service appends bursts only.
func TestPaceWithoutRateWaitsForABurst(t *testing.T) {
	t.Parallel()
	p, extra, more := pace{rate: -1}, 0, make(chan int, 1)
	more <- 3
	for range 3 {
		if !p.waitNext(t.Context(), more, &extra) {
			t.Fatal("ended")
		}
	}

	ctx, cancel := context.WithCancel(t.Context())
	next := make(chan bool, 1)
	go func() { next <- p.waitNext(ctx, more, &extra) }()
	cancel()
	if <-next {
		t.Error("a fourth event of a burst of three")
	}
}

func TestRateLeavesRoomForTwoKills(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rate, events int
		every        time.Duration
		want         int
	}{
		{400, 5000, 4 * time.Second, 400},
		{400, 1000, 4 * time.Second, 100},
		{400, 0, 4 * time.Second, 400},
		{400, 1000, 0, 400},
		{400, 5, 10 * time.Second, 1},
	} {
		if got := limitRate(c.rate, c.events, c.every); got != c.want {
			t.Errorf("%+v: the limit is %d, want %d", c, got, c.want)
		}
	}
}

func TestServiceReportsEachOutcomeToTheChecker(t *testing.T) {
	t.Parallel()
	const n = 300

	client := stacktest.Client(t, options.Client().SetWriteConcern(writeconcern.Majority()))
	db := stacktest.Database(t, client)
	c := check.New(check.Options{})
	s, err := newService(client, defaultNames(), c, 5000, n)
	if err != nil {
		t.Fatal(err)
	}

	s.orders = db.Collection("orders")
	if s.box, err = outbox.New(db); err != nil {
		t.Fatal(err)
	}
	if err := s.createCollections(t.Context()); err != nil {
		t.Fatal(err)
	}

	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := c.Report()
	if r.Committed != n || r.Waiting != n || r.Aborted == 0 || r.Unknown != 0 || len(r.Examples) != 0 {
		t.Errorf("%+v", r)
	}

	// The collection holds exactly the events that the checker counts as committed.
	deliverAll(t, db.Collection("outbox"), c)
	if err := c.Report().Err(); err != nil {
		t.Error(err)
	}

	if orders, err := db.Collection("orders").CountDocuments(t.Context(), bson.D{}); err != nil || orders != n {
		t.Errorf("%d orders: %v", orders, err)
	}
}

func TestServiceStops(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	db := stacktest.Database(t, client)
	c := check.New(check.Options{})
	s, err := newService(client, defaultNames(), c, 500, 0)
	if err != nil {
		t.Fatal(err)
	}

	s.orders = db.Collection("orders")
	if s.box, err = outbox.New(db); err != nil {
		t.Fatal(err)
	}
	if err := s.createCollections(t.Context()); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	stacktest.Eventually(t, "the service has appended 50 events", func() bool { return c.Report().Committed >= 50 })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}

	if r := c.Report(); r.Unknown != 0 || len(r.Examples) != 0 {
		t.Errorf("%+v", r)
	}
}

func TestResultHasTheDocumentedFields(t *testing.T) {
	t.Parallel()
	good := check.Report{Committed: 10, Delivered: 10}
	r := newResult(good, check.Figures{P50: 1.5, P99: 2, Max: 2300}, 2, false)
	b, err := json.Marshal(r)
	if want := `{"events":10,"delivered":10,"lost":0,"duplicates":0,"out_of_order":0,"takeovers":2,"max_gap_ms":2300,"p50_ms":1.5,"p99_ms":2}`; err != nil || string(b) != want {
		t.Errorf("%s %v", b, err)
	}
	if r.Err() != nil || !strings.Contains(r.formatSummary(), "longest wait 2.3 s") {
		t.Errorf("%v %s", r.Err(), r.formatSummary())
	}
	for name, bad := range map[string]check.Report{
		"lost": {Committed: 10, Delivered: 9, Waiting: 1}, "duplicate": {Committed: 10, Duplicates: 1}, "order": {Committed: 10, OutOfOrder: 1},
		"phantom": {Committed: 10, Phantoms: 1}, "strayed": {Committed: 10, Strayed: 1}, "altered": {Committed: 10, Altered: 1}, "nothing": {},
	} {
		if newResult(bad, check.Figures{}, 0, false).Err() == nil {
			t.Errorf("%s is no error", name)
		}
	}

	if err := newResult(check.Report{Foreign: 3}, check.Figures{}, 0, true).Err(); err != nil {
		t.Errorf("an idle service: %v", err)
	}
}

func TestFormats(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 18402: "18,402", 1234567: "1,234,567"} {
		if got := formatThousands(n); got != want {
			t.Errorf("%d is written %s", n, got)
		}
	}
	if a, b := formatDuration(2100*time.Millisecond), formatDuration(1500*time.Microsecond); a != "2.1 s" || b != "1.5 ms" {
		t.Error(a, b)
	}
	if a, b := truncateText("a·b→c", 3), truncateText("ab", 3); a != "a·b" || b != "ab" || truncateText("ab", 0) != "ab" {
		t.Error(a, b)
	}
}

func TestViewWithoutTerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	v := newView(&out, nil)

	// The first figures wait for the interval, a line does not.
	v.showFigures("too early")
	v.printLine("a %d", 1)
	v.lastPrinted = time.Time{}
	v.showFigures("figures")
	v.showFigures("figures again")

	v.lastPrinted = time.Time{}
	v.showFigures("figures")
	v.finishStatus()
	if out.String() != "a 1\nfigures\n" {
		t.Errorf("%q", out.String())
	}

	if OpenTerminal(strings.NewReader(""), &out) != nil {
		t.Error("a buffer is a terminal")
	}
}

// The live line shows each step of the servers, and is empty when they are ready. So no later line repeats a step.
func TestTheStepsOfTheServersEndWithThem(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	d := &demo{view: newView(&out, &Terminal{out: -1}), stack: &devstack.Stack{}}
	d.showProgress(devstack.Progress{What: "Kafka", Stage: devstack.Preparing, Detail: "done"})
	d.showProgress(devstack.Progress{What: "Kafka", Stage: devstack.Starting, Detail: "4.3.0"})
	if !strings.HasSuffix(out.String(), "Kafka    starting  4.3.0") {
		t.Errorf("while Kafka starts, the live line is %q", out.String())
	}

	d.printServers()
	out.Reset()
	d.view.printLine("all ready")
	if got := out.String(); got != "all ready\r\n" {
		t.Errorf("after the start: got %q", got)
	}
}

func TestViewOnATerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	// If the size is unknown, the view has 80 columns.
	v := newView(&out, &Terminal{out: -1})
	v.showFigures("one")
	v.showFigures("two")
	v.printLine("a\nb")
	v.finishStatus()
	const wipe = "\r\x1b[2K"
	if want := "one" + wipe + "two" + wipe + "a\r\nb\r\n" + "two\r\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

func TestRelayIsAskedOverHTTP(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	status := http.StatusOK
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(map[string]any{"ready": status == http.StatusOK, "phase": "standby"})
	})

	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("# HELP x y\nhits_total_more 1\nhits_total 37\n"))
	})
	srv := httptest.NewServer(mux)
	defer srv.Close()
	r := &relays{client: srv.Client()}
	x := &relay{http: strings.TrimPrefix(srv.URL, "http://")}
	if got := r.readPhase(t.Context(), x); got != "standby" {
		t.Errorf("phase %q", got)
	}
	if n, err := r.readCounter(t.Context(), x, "hits_total"); n != 37 || err != nil {
		t.Error(n, err)
	}
	if _, err := r.readCounter(t.Context(), x, "none"); err == nil {
		t.Error("a counter that is not there")
	}
	status = http.StatusServiceUnavailable
	if got := r.readPhase(t.Context(), x); got != "" {
		t.Errorf("one that is not ready is %q", got)
	}
}

func TestOwnSettingsDoNotReachTheRelays(t *testing.T) {
	t.Parallel()
	if got := removeSettings([]string{"PATH=/bin", "OUTRELAY_WATCHER=x", "HOME=/"}); !slices.Equal(got, []string{"PATH=/bin", "HOME=/"}) {
		t.Errorf("%q", got)
	}
}

// Settings reach the relays, or are rejected before anything is started.
func TestSettingsAreAppliedOrRejected(t *testing.T) {
	t.Parallel()
	if err := CheckSettings([]string{"record.preset=plain", "lease.ttl=3s", "topics.rules=[{match: {type: X}, to: [x]}]"}); err != nil {
		t.Error(err)
	}

	for setting, want := range map[string]string{
		"watcher=x":            "watcher",
		"mongodb.uri=x":        "mongodb.uri",
		"kafka.brokers=x:1":    "kafka.brokers",
		"http.listen=off":      "http.listen",
		"topics.template=x":    "topics.template",
		"record.preset=plane":  "plain",
		"record.presett=plain": "record.preset",
		"record.preset":        "path=value",
	} {
		if err := CheckSettings([]string{setting}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", setting, err, want)
		}
	}
}

func TestServiceReportsImpossibleWrites(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	c := check.New(check.Options{})
	s, err := newService(client, defaultNames(), c, 500, 10)
	if err != nil {
		t.Fatal(err)
	}

	s.orders = stacktest.Database(t, client).Collection("$bad")
	err = s.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "cannot append") || errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}

	if r := c.Report(); r.Committed != 0 || r.Aborted == 0 {
		t.Errorf("%+v", r)
	}
}
