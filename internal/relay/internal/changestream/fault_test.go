package changestream

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

func TestEveryPassingFaultIsWaitedOut(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
	var want []string
	step := func(name string, fault func() (off func())) {
		t.Helper()
		before, after := name+" before", name+" after"
		b.insertIDs(coll, before)
		want = append(want, before)
		r.wantIDs(want...)
		sum := func() (n int) {
			for _, c := range r.counts {
				n += c
			}
			return n
		}

		r.mu.Lock()
		seen := sum()
		r.mu.Unlock()
		off := fault()
		r.waitUntil(name+": the restart", func() bool { return sum() > seen })
		off()
		b.insertIDs(coll, after)
		want = append(want, after)
		r.wantIDs(want...)
	}

	for _, code := range []int32{43, 237, 50, 91, 189, 10107, 11600, 11602, 262, 4242} {
		step(fmt.Sprint("getMore ", code), func() func() {
			return b.setFailCommand(failTimes(1), failCommand("getMore", bson.E{Key: "errorCode", Value: code}))
		})
	}

	step("getMore with the label", func() func() {
		return b.setFailCommand(failTimes(1), failCommand("getMore",
			bson.E{Key: "errorCode", Value: int32(4243)}, bson.E{Key: "errorLabels", Value: bson.A{labelResumable}}))
	})
	step("connection closed", func() func() {
		return b.setFailCommand(failTimes(1), failCommand("getMore", bson.E{Key: "closeConnection", Value: true}))
	})

	step("connection closed while resuming, too", func() func() {
		cmds := bson.D{{Key: "failCommands", Value: bson.A{"getMore", "aggregate"}}, {Key: "closeConnection", Value: true}}
		return b.setFailCommand(failTimes(4), cmds)
	})

	step("cursor killed", func() func() {
		// The cursor may be missing from the list between two of its uses.
		for end := time.Now().Add(patience); b.killCursors() == 0; {
			if time.Now().After(end) {
				t.Fatal("no cursor to kill")
			}
		}
		return func() {}
	})
	if driver, ours := r.countRestarts("driver"), r.countRestarts("server"); driver == 0 || ours == 0 {
		t.Errorf("%d restarts by the driver and %d by Run, want both above 0", driver, ours)
	}
}

// killCursors kills the cursors on the outbox and returns their number.
func (b *fixture) killCursors() (killed int) {
	b.t.Helper()
	cur, err := b.admin.Database("admin").Aggregate(b.t.Context(), mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{{Key: "idleCursors", Value: true}, {Key: "allUsers", Value: true}}}},
		{{Key: "$match", Value: bson.D{{Key: "ns", Value: b.db.Name() + ".outbox"}, {Key: "cursor.tailable", Value: true}}}},
	})
	if err != nil {
		b.t.Fatal(err)
	}

	for cur.Next(b.t.Context()) {
		var res struct {
			Killed []int64 `bson:"cursorsKilled"`
		}
		if err := b.db.RunCommand(b.t.Context(), bson.D{
			{Key: "killCursors", Value: "outbox"},
			{Key: "cursors", Value: bson.A{cur.Current.Lookup("cursor", "cursorId")}},
		}).Decode(&res); err != nil {
			b.t.Fatal(err)
		}
		killed += len(res.Killed)
	}

	return killed
}

func TestBadTokensAreGapsAtOnce(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a")
	scope := scopeOf(t, b.db.Name()+".outbox")
	r := b.startReader(scope, changes.Start{At: &at})
	r.wantIDs("a")
	good := r.eventAt(0).data
	_ = r.stopReader()

	// The server detects a wrong token only at a later event.
	for i := 0; b.clusterTime().T <= r.pos.ClusterTime.T; i++ {
		b.insertIDs(coll, fmt.Sprint("later", i))
		<-time.After(50 * time.Millisecond)
	}

	b.insertIDs(coll, "last")
	raw := func(d bson.D) resume.Token {
		data, err := bson.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}

	flip := func(i int) string {
		digit := "F"
		if good[i] == 'F' {
			digit = "0"
		}
		return good[:i] + digit + good[i+1:]
	}

	for _, c := range []struct {
		name  string
		token resume.Token
		code  int
	}{
		{"an empty document", raw(bson.D{}), 40647},
		{"another field", raw(bson.D{{Key: "foo", Value: 1}}), 40647},
		{"a number", raw(bson.D{{Key: "_data", Value: 5}}), 40647},
		{"an empty text", resume.TokenOf(""), 40649},
		{"not hexadecimal", resume.TokenOf("zz"), 9},
		{"an odd length", resume.TokenOf(good[:len(good)-1]), 9},
		{"one byte", resume.TokenOf("82"), 15},
		{"the time alone", resume.TokenOf(good[:18]), 50796},
		{"another collection's", resume.TokenOf(flip(50)), 280},
		{"another history's", resume.TokenOf(flip(17)), 280},
	} {
		t.Log(c.name)
		r := b.startReader(scope, changes.Start{Position: resume.Position{Token: c.token}}, func(p *pace) {
			// The watchdog must not be the cause of the gap.
			p.watchdog = time.Minute
		})

		gap := r.wantGap(changes.GapTokenRejected)
		if gap.Code != c.code {
			t.Errorf("%s: code %d, want %d", c.name, gap.Code, c.code)
		}
		if opened := r.countRestarts("", "timeout"); opened > 0 || len(r.events) > 0 {
			t.Errorf("%s: %d reopenings and %d events, want 0 and 0", c.name, opened, len(r.events))
		}
	}
}

func TestLostHistoryAndUnexplainedErrors(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	at := b.clusterTime()
	scope := scopeOf(t, b.db.Name()+".outbox")

	for _, code := range []int32{286, 136, 280} {
		off := b.setFailCommand("alwaysOn", failCommand("getMore", bson.E{Key: "errorCode", Value: code}))
		r := b.startReader(scope, changes.Start{At: &at})
		want := changes.GapHistoryLost
		if code == 280 {
			want = changes.GapTokenRejected
		}
		if gap := r.wantGap(want); gap.Code != int(code) || !strings.Contains(gap.Error(), "gap after") {
			t.Errorf("code %d: gap %v with code %d", code, gap, gap.Code)
		}
		if r.countRestarts("", "timeout") > 0 {
			t.Errorf("code %d: restarts %v, want none", code, r.counts)
		}

		off()
	}

	off := b.setFailCommand("alwaysOn", failCommand("getMore", bson.E{Key: "errorCode", Value: int32(4242)}))
	defer off()
	r := b.startReader(scope, changes.Start{At: &at})
	if gap := r.wantGap(changes.GapUnexplained); gap.Code != 4242 {
		t.Errorf("code %d, want 4242", gap.Code)
	}
	if r.counts["unknown"] != unknownAttempts-1 {
		t.Errorf("restarts %v, want %d unknown", r.counts, unknownAttempts-1)
	}
}

func TestMissingPrivilegeIsReportedAndHeals(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a")
	ns := b.db.Name() + ".outbox"
	r := b.startReader(scopeOf(t, ns), changes.Start{At: &at})
	r.wantIDs("a")
	off := b.setFailCommand("alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"getMore", "aggregate"}},
		{Key: "errorCode", Value: int32(13)},
	})
	phase := func() State {
		if len(r.states) == 0 {
			return State{}
		}
		return r.states[len(r.states)-1]
	}

	r.waitUntil("the state", func() bool { return phase().Phase == ConfigError })
	r.waitUntil("a second attempt", func() bool { return r.counts["config"] > 1 })
	if s := r.stream.State(); s.Code != 13 || s.Ready() || !strings.Contains(s.Reason, "changeStream") ||
		!strings.Contains(s.Reason, ns) {
		t.Errorf("state %+v, want code 13, not ready, and a reason that names changeStream and %s", s, ns)
	}

	off()
	b.insertIDs(coll, "b")
	r.wantIDs("a", "b")
	r.waitUntil("live again", func() bool { return phase().Phase == Live && phase().Reason == "" })
}

func TestASlowResponseIsGivenMoreTimeInsteadOfALoop(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a")

	// Each response takes longer than the first limit of 100 + 100 ms.
	off := b.setFailCommand("alwaysOn", failCommand("getMore", bson.E{Key: "blockConnection", Value: true},
		bson.E{Key: "blockTimeMS", Value: int32(500)}))
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at},
		func(p *pace) { p.patience = 100 * time.Millisecond })
	r.wantIDs("a")
	off()

	// The limit doubles each time, so after ten times it is longer than any response takes. A fixed limit
	// would end in an endless loop.
	if n := r.countRestarts("timeout"); n < 1 || n > 10 {
		t.Errorf("%d timeouts, want 1 to 10", n)
	}
}

func TestALostResponseDoesNotStopRefetch(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a")
	s, err := New(Config{Client: b.watch, Scope: scopeOf(t, b.db.Name()+".outbox")})
	if err != nil {
		t.Fatal(err)
	}
	s.pace.patience = time.Second

	off := b.setFailCommand("alwaysOn", failCommand("getMore", bson.E{Key: "blockConnection", Value: true},
		bson.E{Key: "blockTimeMS", Value: int32(10_000)}))
	found := false
	refetch := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return s.Refetch(ctx, resume.Position{ClusterTime: at}, func(*changes.Event) bool { return true },
			func(*changes.Event, []byte) bool { found = true; return false })
	}
	if err := refetch(); !errors.Is(err, changes.ErrTimeout) || Lost(err) {
		t.Errorf("Refetch returned %v, want a timeout, after which the events are read again", err)
	}
	if s.refetchPatience != 2*time.Second {
		t.Errorf("the next call waits for %s, want twice as long", s.refetchPatience)
	}

	off()
	if err := refetch(); err != nil || !found || s.refetchPatience != 0 {
		t.Errorf("the next call: error %v, found %v, patience %s", err, found, s.refetchPatience)
	}
}

// TestNoLeakOverManyReopenings counts the goroutines of the whole process, so no other test may run at the
// same time.
func TestNoLeakOverManyReopenings(t *testing.T) {
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a")
	const rounds = 200
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at}, func(p *pace) {
		p.backoff = retry.Policy{Base: time.Microsecond, Cap: time.Microsecond}
		p.maxAwait = 10 * time.Millisecond
	})

	r.wantIDs("a")
	goroutines := runtime.NumGoroutine()
	off := b.setFailCommand(failTimes(rounds), failCommand("getMore", bson.E{Key: "errorCode", Value: int32(50)}))
	r.waitUntil("the reopenings", func() bool { return r.counts["server"] >= rounds })
	off()
	b.insertIDs(coll, "b")
	r.wantIDs("a", "b")

	// The number of the driver's own goroutines varies.
	if n := runtime.NumGoroutine(); n > goroutines+rounds/4 {
		t.Errorf("%d goroutines, want at most %d", n, goroutines+rounds/4)
	}

	// A call that ends a cursor is not repeated. On a busy machine a few calls get no response in time, and the
	// server ends these cursors later.
	const lost = rounds / 40
	b.waitForCursors(1 + lost)
	if err := r.stopReader(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}

	b.waitForCursors(lost)
}

func TestClassesByCodeAndLabel(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want errorClass
		code int
	}{
		{errors.New("server selection"), classResume, 0},
		{mongo.CommandError{Labels: []string{labelNetwork}}, classResume, 0},
		{mongo.CommandError{Code: 43}, classResume, 43},
		{mongo.CommandError{Code: 999, Labels: []string{labelResumable}}, classResume, 999},
		{mongo.CommandError{Code: 999, Labels: []string{labelNotResumable}}, classGap, 999},
		{mongo.CommandError{Code: 999}, classUnknown, 999},
		{fmt.Errorf("wrapped: %w", mongo.CommandError{Code: 18}), classConfig, 18},
		{mongo.CommandError{Code: 10334}, classOversize, 10334},
		{mongo.ErrClientDisconnected, classFatal, 0},
	} {
		class, code, reason := classifyError(c.err)
		if class != c.want || code != c.code || reason == "" {
			t.Errorf("classifyError(%v) = %d, %d, %q, want %d, %d and a reason", c.err, class, code, reason, c.want, c.code)
		}
	}

	for code, class := range classByCode {
		if class == classConfig && len(describeMisconfiguration(code, scopeOf(t, "a.b", "a.c"))) < 40 {
			t.Errorf("code %d has no advice", code)
		}
	}
}
