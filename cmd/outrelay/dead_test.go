package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// graveyard is a watcher with an outbox and n dead letters d0, d1, …. The last letter has only an id.
type graveyard struct {
	t      *testing.T
	env    []string
	outbox *mongo.Collection
	state  state.Database
}

func newGraveyard(t *testing.T, n int) *graveyard {
	t.Helper()
	return newGraveyardIn(t, stacktest.Client(t), stacktest.MongoURI(t), n)
}

// newGraveyardIn is newGraveyard on the servers of client, which uri names.
func newGraveyardIn(t *testing.T, client *mongo.Client, uri string, n int) *graveyard {
	t.Helper()
	g := &graveyard{t: t, state: statetest.New(t, client), outbox: stacktest.Database(t, client).Collection("outbox")}
	ns := g.outbox.Database().Name() + ".outbox"
	g.env = []string{
		"OUTRELAY_MONGODB_URI=" + uri, "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1", "OUTRELAY_WATCHER=orders",
		"OUTRELAY_STATE_DATABASE=" + g.state.Name(), "OUTRELAY_WATCH=" + ns,
	}

	g.insertDocument(g.state.Collection("watchers"), bson.D{{Key: "_id", Value: "orders/0of1"}, {Key: "fence", Value: int64(1)}})
	g.insertDocument(g.state.Collection("collections"), bson.D{{Key: "_id", Value: bson.Binary{Subtype: 4, Data: make([]byte, 16)}}, {Key: "ns", Value: ns}, {Key: "watcher", Value: "orders"}})
	for i := range n {
		id := fmt.Sprint("d", i)
		envelope := bson.D{
			{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "OrderPlaced"}, {Key: "payload", Value: plantedSecret},
		}
		if i == n-1 {
			envelope = envelope[:1]
		}

		g.insertDocument(g.state.Collection("letters"), bson.D{
			{Key: "_id", Value: fmt.Sprintf("dead-%026d", i)},
			{Key: "watcher", Value: "orders"},
			{Key: "ns", Value: ns},
			{Key: "id", Value: id},
			{Key: "delivery", Value: int32(0)},
			{Key: "envelope", Value: envelope},
			{Key: "size", Value: 100},
			{Key: "class", Value: "record_rejected"},
			{Key: "reason", Value: "rejected (87)\nby \x1b[31mit"},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "aggregatetype", Value: "order"},
			{Key: "key", Value: fmt.Sprint("k", i%2)},
			{Key: "fingerprint", Value: "5f0c"},
			{Key: "failure", Value: "rejected"},
			{Key: "slot", Value: int32(0)},
			{Key: "topic", Value: "orders"},
			{Key: "partition", Value: int32(3)},
			{Key: "source", Value: bson.D{{Key: "kind", Value: "relay"}}},
			{Key: "attempts", Value: bson.A{bson.D{{Key: "at", Value: time.Now()}, {Key: "class", Value: "record_rejected"}, {Key: "reason", Value: "87"}}}},
			{Key: "movedAt", Value: time.Now().Add(-time.Duration(n-i) * time.Minute)},
			{Key: "pos", Value: fmt.Sprintf("82%08X", i)},
		})
	}
	return g
}

func (g *graveyard) insertDocument(coll *mongo.Collection, doc bson.D) {
	g.t.Helper()
	if _, err := coll.InsertOne(g.t.Context(), doc); err != nil {
		g.t.Fatal(err)
	}
}

// runCommand runs a command, whose output must not contain the payload, and decodes its JSON into result unless
// that is nil.
func (g *graveyard) runCommand(want int, result any, args ...string) string {
	g.t.Helper()
	if result != nil {
		args = append(args, "--json")
	}

	code, out, errOut := runCommand(g.t, g.env, args...)
	if code != want || strings.Contains(out+errOut, plantedSecret) || strings.Contains(out+errOut, "\x1b") {
		g.t.Errorf("%v: %d, want %d: %s%s", args, code, want, out, errOut)
	}
	if result != nil && out != "" {
		if err := json.Unmarshal([]byte(out), result); err != nil {
			g.t.Errorf("%v: %v: %q", args, err, out)
		}
	}
	return out + errOut
}

func (g *graveyard) countWaiting() int64 {
	g.t.Helper()
	n, err := g.state.Collection("waiting").CountDocuments(g.t.Context(), bson.D{})
	if err != nil {
		g.t.Fatal(err)
	}
	return n
}

func TestDeadLettersAreListedAndShown(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 5)
	text := g.runCommand(0, nil, "dead", "list", "--limit", "2", "--topic", "orders", "--since", "2h")
	if !strings.Contains(text, "2 of 5 dead letters") || !strings.Contains(text, "d4") || strings.Contains(text, "d2 ") {
		t.Errorf("unexpected output:\n%s", text)
	}

	after := text[strings.Index(text, "--after ")+8:]
	var page admin.Page[admin.DeadLetter]
	if g.runCommand(0, &page, "dead", "list", "--after", strings.TrimSpace(after)); len(page.Items) != 3 || page.Items[0].ID != "d2" || page.Total != 5 || page.Next != "" {
		t.Errorf("unexpected result %+v", page)
	}
	if text := g.runCommand(0, nil, "dead", "list", "--class", "malformed"); !strings.HasPrefix(text, "no dead letter matches; searched databases of services: ") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(0, nil, "dead", "summary", "d1", "d2"); !strings.Contains(text, "2 ") || !strings.Contains(text, "record_rejected") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var sum struct{ Groups []admin.DeadGroup }
	if g.runCommand(0, &sum, "dead", "summary"); len(sum.Groups) != 1 || sum.Groups[0].Count != 5 || sum.Groups[0].Fingerprint != "5f0c" {
		t.Errorf("unexpected result %+v", sum)
	}
	for n, condition := range map[int64][]string{
		2: {"--key", "k1"}, 5: {"--fingerprint", sum.Groups[0].Fingerprint}, 3: {"--fingerprint", "5f0c", "--key", "k0"},
	} {
		if g.runCommand(0, &page, append([]string{"dead", "list"}, condition...)...); page.Total != n || *page.Items[0].Partition != 3 {
			t.Errorf("%v: %+v", condition, page)
		}
	}
	if text := g.runCommand(0, nil, "dead", "show", "d1"); !strings.Contains(text, `"type": "OrderPlaced"`) || !strings.Contains(text, "1 attempt\n") || !strings.Contains(text, "version        0") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if code, out, _ := runCommand(t, g.env, "dead", "show", "d1", "--payload", "--json"); code != 0 || !strings.Contains(out, plantedSecret) {
		t.Errorf("with its payload: %d %s", code, out)
	}

	for want, args := range map[string][]string{
		"dead letter of id unknown: not found": {"show", "unknown"}, "class": {"list", "--class", "malfored"}, "--since": {"list", "--since", "then"},
		"--limit": {"list", "--limit", "0"}, "cursor": {"list", "--after", "x"}, "does not read": {"list", "--collection", "a.b"},
	} {
		if text := g.runCommand(exitConfig, nil, append([]string{"dead"}, args...)...); !strings.Contains(text, want) {
			t.Errorf("%v: %q", args, text)
		}
	}
	if text := g.runCommand(exitConfig, nil, "dead", "list", "--class", "nope"); strings.Count(text, "malformed") != 1 || !strings.Contains(text, "panic") {
		t.Errorf("the classes of relay and handlers are not listed once: %q", text)
	}
}

func TestDeadLettersAreRequeued(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 5)
	if text := g.runCommand(exitConfig, nil, "dead", "requeue", "--yes"); !strings.Contains(text, "--all") {
		t.Errorf("nothing named: %s", text)
	}
	if text := g.runCommand(exitConfig, nil, "dead", "requeue", "d0", "d1"); !strings.Contains(text, "requeue 2 dead letters; consumers") || !strings.Contains(text, "--yes") || g.countWaiting() != 0 {
		t.Errorf("no terminal: %s", text)
	}

	var o admin.DeadOutcome
	if g.runCommand(exitConfig, &o, "dead", "requeue", "--class", "record_rejected", "--dry-run"); !o.DryRun || o.Requeued != 4 || o.Rejected != 1 || g.countWaiting() != 0 {
		t.Errorf("unexpected result %+v", o)
	}
	if text := g.runCommand(0, nil, "dead", "requeue", "d0", "--yes"); text != "1 dead letter requeued, 0 rejected\n" || g.countWaiting() != 1 {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "dead", "requeue", "--all", "-y", "--actor", "ann"); !strings.Contains(text, "3 dead letters requeued, 1 rejected\n") || !strings.Contains(text, "d4 delivery 0: only its id is left; edit it") || g.countWaiting() != 4 {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(0, nil, "dead", "list", "--requeued", "false"); !strings.Contains(text, "1 of 1 dead letter\n") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var page admin.Page[admin.DeadLetter]
	if g.runCommand(0, &page, "dead", "list", "--requeued", "true"); page.Total != 4 || page.Items[0].Requeued.Actor != "ann" {
		t.Errorf("unexpected result %+v", page)
	}

	n, err := g.state.Collection("audit").CountDocuments(t.Context(), bson.D{{Key: "kind", Value: "dead_requeued"}, {Key: "fields.actor", Value: "ann"}, {Key: "fields.requeued", Value: 3}})
	if err != nil || n != 1 {
		t.Errorf("%d entries in the log, %v", n, err)
	}
}

// TestARequeueThatWouldDieAgainIsRejected: the command has the routing, so it finds that before anything is stored.
func TestARequeueThatWouldDieAgainIsRejected(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 3)
	g.env = append(g.env, "OUTRELAY_TOPICS_ALLOW=payments")
	for _, more := range [][]string{{"--dry-run"}, {"--yes"}} {
		text := g.runCommand(exitConfig, nil, append([]string{"dead", "requeue", "d0"}, more...)...)
		expectTexts(t, text, "0 dead letters", "1 rejected", `topic "outbox.event.order" matches nothing in topics.allow; correct the routing`)
	}
	if n := g.countWaiting(); n != 0 {
		t.Errorf("%d envelopes wait", n)
	}

	expectTexts(t, g.runCommand(exitOK, nil, "dead", "requeue", "d0", "--to-topic", "payments", "--yes"), "1 dead letter requeued, 0 rejected")
	text := g.runCommand(exitConfig, nil, "dead", "edit", "d1", "--version", "0", "--key", "k", "--yes")
	expectTexts(t, text, "matches nothing in topics.allow")
}

func TestDeadLettersAreEdited(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 2)
	payload := filepath.Join(t.TempDir(), "payload")
	if err := os.WriteFile(payload, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}

	edit := func(want int, args ...string) string {
		t.Helper()
		return g.runCommand(want, nil, append([]string{"dead", "edit"}, args...)...)
	}

	for want, args := range map[string][]string{
		"--version is missing": {"d0", "--topic", "t"}, "--yes": {"d0", "--version", "0", "--topic", "t"}, "it is at version 0": {"d0", "--version", "2", "--topic", "t", "-y"},
		"changes nothing": {"d0", "--version", "0", "-y"}, "name=value": {"d0", "--version", "0", "--field", "x", "-y"}, "no such file": {"d0", "--version", "0", "--payload", "/no/such/file", "-y"},
		"set aggregatetype, aggregateid, payload in an edit: add --field aggregatetype=VALUE --field aggregateid=VALUE --payload FILE": {"d1", "--version", "0", "--type", "T", "-y"},
		"--field cannot set payload: use --payload FILE": {"d0", "--version", "0", "--field", "payload=x", "-y"}, "use --header NAME=VALUE": {"d0", "--version", "0", "--field", "headers=x", "-y"},
		`"_id"`: {"d0", "--version", "0", "--field", "_id=x", "-y"}, "--header": {"d0", "--version", "0", "--header", "h", "-y"},
	} {
		if text := edit(exitConfig, args...); !strings.Contains(text, want) {
			t.Errorf("%v: %q, want %q", args, text, want)
		}
	}

	if text := edit(0, "d0", "--version", "0", "--payload", payload, "--dry-run"); !strings.Contains(text, "would be requeued as delivery 1 with changed payload") || g.countWaiting() != 0 {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := edit(0, "d0", "--version", "0", "--payload", payload, "--header", "h=v=w", "--key", "k", "-y"); !strings.Contains(text, "is requeued as delivery 1 with changed headers, key, payload") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := edit(exitConfig, "d0", "--version", "1", "--key", "k", "-y"); !strings.Contains(text, "requeued it at") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var e admin.DeadEdited
	if g.runCommand(0, &e, "dead", "edit", "d1", "--version", "0", "--field", "aggregatetype=order", "--field", "aggregateid=7", "--type", "T", "--payload", payload, "--payload-as", "string", "-y"); e.Delivery != 1 || e.ID != "d1" {
		t.Errorf("unexpected result %+v", e)
	}

	for _, id := range []string{"d0", "d1"} {
		raw, err := g.state.Collection("waiting").FindOne(t.Context(), bson.D{{Key: "id", Value: id}}).Raw()
		if err != nil || raw.Lookup("envelope", "payload").StringValue() != "new" || raw.Lookup("reason").StringValue() != "queued" {
			t.Errorf("%s, %v", raw, err)
		}
	}
}

// The exit code of an action is 0 only if each of the named ids has a letter. The ids without one are named, and the others are acted on.
func TestActionsOnLettersNameUnknownIDs(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 3)
	text := g.runCommand(exitConfig, nil, "dead", "requeue", "d1", "typo", "-y")
	expectTexts(t, text, "typo matches no dead letter", "1 dead letter requeued, 0 rejected")
	if strings.Contains(text, "d1 matches") || g.countWaiting() != 1 {
		t.Errorf("unexpected output:\n%s", text)
	}
	// The requeued letter is still one.
	g.runCommand(0, nil, "dead", "requeue", "d1", "-y")

	expectTexts(t, g.runCommand(exitConfig, nil, "dead", "discard", "d2", "typo", "--dry-run"), "typo matches no dead letter", "1 dead letter would be discarded")
	expectTexts(t, g.runCommand(exitConfig, nil, "dead", "discard", "d2", "typo", "-y"), "typo matches no dead letter", "1 dead letter discarded")
	var discarded admin.DeadDiscarded
	if g.runCommand(exitConfig, &discarded, "dead", "discard", "typo", "-y"); len(discarded.NotFound) != 1 || discarded.NotFound[0] != "typo" {
		t.Errorf("unexpected result %+v", discarded)
	}
}

func TestDeadLettersAreDiscarded(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 5)
	if text := g.runCommand(exitConfig, nil, "dead", "discard", "-y"); !strings.Contains(text, "--all") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(0, nil, "dead", "discard", "--message", "rejected (", "--dry-run"); !strings.HasPrefix(text, "5 dead letters would be discarded; in the archive until ") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "dead", "discard", "d1"); !strings.Contains(text, "discard 1 dead letter; dead_letters.archive keeps them in the archive until ") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var d admin.DeadDiscarded
	if g.runCommand(0, &d, "dead", "discard", "d1", "-y", "--actor", "ann"); d.Discarded != 1 || d.ArchivedUntil == nil {
		t.Errorf("unexpected result %+v", d)
	}

	// A discarded letter is only in the archive, from which a requeue takes it back.
	if text := g.runCommand(0, nil, "dead", "list", "d1"); !strings.HasPrefix(text, "no dead letter matches; searched databases of services: ") {
		t.Errorf("unexpected output:\n%s", text)
	}
	expectTexts(t, g.runCommand(0, nil, "dead", "list", "--archived"), "DISCARDED BY", "REMOVED AT", "d1", " ann ")
	expectTexts(t, g.runCommand(0, nil, "dead", "show", "d1"), "discarded      by ann at ", "removed at ")
	expectTexts(t, g.runCommand(1, nil, "dead", "requeue", "d1", "-y"), "matches no dead letter")
	if text := g.runCommand(0, nil, "dead", "requeue", "--archived", "d1", "-y"); text != "1 dead letter requeued, 0 rejected\n" || g.countWaiting() != 1 {
		t.Errorf("unexpected output:\n%s", text)
	}

	if text := g.runCommand(0, nil, "dead", "discard", "--all", "-y"); !strings.HasPrefix(text, "4 dead letters discarded; in the archive until ") {
		t.Errorf("unexpected output:\n%s", text)
	}
	expectTexts(t, g.runCommand(exitConfig, nil, "dead", "discard", "--archived", "--all"), "remove 5 dead letters for good")
	if text := g.runCommand(0, nil, "dead", "discard", "--archived", "--all", "-y"); text != "5 dead letters discarded\n" {
		t.Errorf("unexpected output:\n%s", text)
	}
	if n, err := g.state.Collection("letters").CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("%d letters are left, %v", n, err)
	}
}

// Without an archive, a discard removes the letters at once.
func TestWithoutAnArchiveADiscardRemoves(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 2)
	g.env = append(g.env, "OUTRELAY_DEAD_LETTERS_ARCHIVE=0")
	expectTexts(t, g.runCommand(exitConfig, nil, "dead", "discard", "d0"), "remove 1 dead letter for good")
	if text := g.runCommand(0, nil, "dead", "discard", "--all", "-y"); text != "2 dead letters discarded\n" {
		t.Errorf("unexpected output:\n%s", text)
	}
	if n, err := g.state.Collection("letters").CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("%d letters are left, %v", n, err)
	}
}

func TestFailedCommands(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 1)
	for i := range 3 {
		doc := bson.D{{Key: "_id", Value: fmt.Sprint("f", i)}, {Key: "type", Value: "T"}, {Key: "payload", Value: plantedSecret}}
		e := admintest.Waits(t, mongodb.Namespace(g.outbox), doc, waiting.Retry, "orders")
		e.Attempts, e.NextAt = 2, time.Now().Add(time.Hour)
		e.Error = &record.Attempt{Class: "record_rejected", Reason: "87", At: time.Now()}
		admintest.StoreWaiting(t, g.state.Collection("waiting"), e)
	}

	if text := g.runCommand(0, nil, "failed", "list"); strings.Count(text, "record_rejected") != 3 {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "failed", "list", "--limit", "1001"); !strings.Contains(text, "--limit") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var o admin.FailedOutcome
	if g.runCommand(exitConfig, &o, "failed", "reset", "f0", "x", "--dry-run"); o.Failed != 1 || o.Done != 0 || !o.DryRun {
		t.Errorf("unexpected result %+v", o)
	}
	if text := g.runCommand(exitConfig, nil, "failed", "reset", "f0", "x"); !strings.Contains(text, "retry 1 failed envelope now; pass --yes") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "failed", "reset", "f0", "x", "-y"); !strings.HasPrefix(text, "x matches no failed envelope;") || !strings.HasSuffix(text, "\n1 failed envelope reset\n") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var page, rest admin.Page[admin.WaitingEnvelope]
	if g.runCommand(0, &page, "failed", "list", "--limit", "1"); len(page.Items) != 1 || page.Total != 2 || page.Items[0].Attempts != 2 {
		t.Errorf("unexpected result %+v", page)
	}
	if g.runCommand(0, &rest, "failed", "list", "--after", page.Next); len(rest.Items) != 1 || rest.Next != "" || rest.Items[0].ID == page.Items[0].ID {
		t.Errorf("the rest after %+v: %+v", page, rest)
	}
	if text := g.runCommand(exitConfig, nil, "failed", "retry", "-y"); !strings.Contains(text, "--all") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(0, nil, "failed", "retry", "--all", "-y"); text != "2 failed envelopes retried\n" {
		t.Errorf("unexpected output:\n%s", text)
	}
}

func TestAShownPayloadIsRedactedAndLogged(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 2)
	g.env = append(g.env, "OUTRELAY_HTTP_ADMIN_TOKEN=0123456789abcdef", "OUTRELAY_HTTP_ADMIN_REDACT_PATHS=$.card")
	var letter struct {
		Envelope struct{ Payload string }
	}
	g.runCommand(0, &letter, "dead", "show", "d0", "--payload")
	if letter.Envelope.Payload != "***" {
		t.Errorf("the payload is shown as %q", letter.Envelope.Payload)
	}

	shown := bson.D{{Key: "kind", Value: "payload_shown"}, {Key: "fields.id", Value: "d0"}, {Key: "fields.source", Value: "cli"}}
	if n, err := g.state.Collection("audit").CountDocuments(t.Context(), shown); err != nil || n != 1 {
		t.Errorf("the audit log has %d entries about the payload (%v)", n, err)
	}
}

// The list prints an id of each letter that the other commands accept, also for ids that no event may have.
func TestLettersWithOddIDs(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 0)
	ns := g.outbox.Database().Name() + ".outbox"
	ids := []any{
		int32(12345), 12.5,
		bson.D{{Key: "a", Value: int32(1)}, {Key: "b", Value: "x y"}},
		true,
		bson.Binary{Subtype: 3, Data: []byte("0123456789abcdef")},
		bson.NewDateTimeFromTime(time.UnixMilli(1_700_000_000_000)),
	}
	for i, id := range ids {
		g.insertDocument(g.state.Collection("letters"), bson.D{
			{Key: "_id", Value: fmt.Sprintf("dead-%026d", i)},
			{Key: "watcher", Value: "orders"},
			{Key: "ns", Value: ns},
			{Key: "id", Value: id},
			{Key: "delivery", Value: int32(0)},
			{Key: "envelope", Value: bson.D{
				{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "Placed"}, {Key: "payload", Value: "x"},
			}},
			{Key: "class", Value: "malformed"},
			{Key: "reason", Value: "_id is of a wrong type"},
			{Key: "movedAt", Value: time.Now()},
			{Key: "source", Value: bson.D{{Key: "kind", Value: "relay"}}},
			{Key: "attempts", Value: bson.A{}},
		})
	}

	var page admin.Page[admin.DeadLetter]
	g.runCommand(0, &page, "dead", "list")
	if len(page.Items) != len(ids) {
		t.Fatalf("%d letters, want %d", len(page.Items), len(ids))
	}
	for _, l := range page.Items {
		var shown admin.DeadLetter
		g.runCommand(0, &shown, "dead", "show", l.ID)
		if l.ID == "" || shown.ID != l.ID || shown.Letter != l.Letter {
			t.Errorf("letter %q is shown as %q", l.ID, shown.ID)
		}
		if text := g.runCommand(exitConfig, nil, "dead", "requeue", l.ID, "--yes"); !strings.Contains(text, "0 dead letters requeued, 1 rejected") || !strings.Contains(text, "append the event again with another id") {
			t.Errorf("%s: %s", l.ID, text)
		}
	}
	g.runCommand(0, nil, "dead", "discard", page.Items[0].ID, "--yes")
	g.runCommand(0, &page, "dead", "list")
	if page.Total != int64(len(ids)-1) {
		t.Errorf("%d letters are left", page.Total)
	}
}

// The question before a requeue has the numbers of the result.
func TestARequeueAsksWithThePlan(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 4)
	want := "requeue 3 dead letters; consumers get the same ids again, and handlers only the messages that they gave up (1 cannot be requeued as they are, and stay)"
	if text := g.runCommand(exitConfig, nil, "dead", "requeue", "--all"); !strings.Contains(text, want) {
		t.Errorf("unexpected question: %s", text)
	}
	if text := g.runCommand(exitConfig, nil, "dead", "requeue", "--all", "--to-topic", "orders.v2"); !strings.Contains(text, "requeue 3 dead letters to topic orders.v2; consumers") {
		t.Errorf("unexpected question: %s", text)
	}
	if text := g.runCommand(exitConfig, nil, "dead", "requeue", "--all", "--to-topic", "orders v2", "--yes"); !strings.Contains(text, `topic "orders v2": a topic name may contain only`) {
		t.Errorf("a bad topic: %s", text)
	}
	expectTexts(t, g.runCommand(exitConfig, nil, "dead", "requeue", "--all", "--dry-run"), "3 dead letters would be requeued, 1 rejected")
	expectTexts(t, g.runCommand(exitConfig, nil, "dead", "requeue", "--all", "--yes"), "3 dead letters requeued, 1 rejected")
}
