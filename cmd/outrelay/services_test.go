package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/sagas"
)

func TestLookupCommand(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	var f admin.LookupResult
	d.runCommand(&f, exitOK, "lookup", "Reminder-1")
	if len(f.Envelopes) != 1 || f.Envelopes[0].State != "scheduled" {
		t.Errorf("unexpected result %+v", f)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "lookup", "Reminder-1"), "Reminder-1: scheduled", "Reminder of order/o", "due")

	// An event that is not sent may wait for the end of a pause.
	d.runCommand(nil, exitOK, "pause", "--actor", "ann")
	expectTexts(t, d.runCommand(nil, exitOK, "lookup", "Reminder-1"), "note: watcher default is paused, by ann since ", "so events wait: outrelay resume ends the pause")
	d.runCommand(nil, exitOK, "resume")
	if text := d.runCommand(nil, exitOK, "lookup", "Reminder-1"); strings.Contains(text, "paused") {
		t.Errorf("after the pause: %s", text)
	}

	// A service may write to another database than the one that the relay reads.
	expectTexts(t, d.runCommand(nil, exitConfig, "lookup", "nothing"), "Nothing was found", "Searched: "+d.shop.Name()+".", "outrelay doctor names such collections")
	for _, args := range [][]string{{}, {"x", "--key", "y"}, {"--key", "y", "--limit", "0"}, {"--key", "y", "--from", "soon"}} {
		d.runCommand(nil, exitConfig, append([]string{"lookup"}, args...)...)
	}
}

func TestLookupShowsAConversation(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	header := func(name, value string) bson.D {
		return bson.D{{Key: "k", Value: name}, {Key: "v", Value: []byte(value)}}
	}
	d.insertDocument(d.shop.Collection("outbox"), bson.D{
		{Key: "_id", Value: "answer"},
		{Key: "type", Value: "Answered"},
		{Key: "aggregatetype", Value: "response"},
		{Key: "aggregateid", Value: "r1"},
		{Key: "payload", Value: nil},
		{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Unix()), I: 1}},
		{Key: "headers", Value: bson.A{header("correlation-id", "Reminder-1"), header("causation-id", "Reminder-1")}},
	})

	text := d.runCommand(nil, exitOK, "lookup", "--conversation", "Reminder-1")
	expectTexts(t, text, "  Reminder of order/o", ": scheduled", "    Answered of response/r1: appended", " answer)")
	if strings.Index(text, "Reminder of") > strings.Index(text, "Answered of") {
		t.Errorf("the answer comes before its cause:\n%s", text)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "lookup", "answer"), "conversation Reminder-1")
	var event admin.LookupResult
	d.runCommand(&event, exitOK, "lookup", "answer")
	if len(event.Envelopes) != 1 || event.Envelopes[0].CorrelationID != "Reminder-1" || event.Envelopes[0].CausationID != "Reminder-1" {
		t.Errorf("unexpected result %+v", event)
	}
	var found admin.Conversation
	d.runCommand(&found, exitOK, "lookup", "--conversation", "Reminder-1", "--limit", "1000", "--from", "1h")
	if len(found.Events) != 2 || found.Events[1].Depth != 1 || found.Events[1].CausationID != "Reminder-1" {
		t.Errorf("unexpected result %+v", found)
	}
	expectTexts(t, d.runCommand(nil, exitConfig, "lookup", "--conversation", "nothing"), "Nothing was found", "correlation-id nothing")
	for _, args := range [][]string{{"x", "--conversation", "y"}, {"--key", "y", "--conversation", "z"}} {
		d.runCommand(nil, exitConfig, append([]string{"lookup"}, args...)...)
	}
}

type order struct{ Total int }

func TestSagaCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	expectTexts(t, d.runCommand(nil, exitOK, "saga", "types"), "no service", d.shop.Name())
	s := sagas.NewMongo(d.shop)
	if _, err := s.Prepare(t.Context(), sagas.Type{Name: "payments", Owner: "shop.Payment", ID: sagas.String}); err != nil {
		t.Fatal(err)
	}

	for i := range 3 {
		d.insertDocument(d.shop.Collection("payments"), bson.D{
			{Key: "_id", Value: fmt.Sprint("p", i)},
			{Key: "version", Value: int64(i + 1)},
			{Key: "createdAt", Value: time.Now()},
			{Key: "updatedAt", Value: time.Now().Add(time.Duration(i) * time.Second)},
			{Key: "state", Value: order{i}},
		})
	}

	var types struct{ Types []admin.SagaType }
	d.runCommand(&types, exitOK, "saga", "types")
	if len(types.Types) != 1 || types.Types[0].Count != 3 || types.Types[0].Owner != "shop.Payment" {
		t.Errorf("unexpected result %+v", types)
	}

	var page admin.Page[admin.Saga]
	d.runCommand(&page, exitOK, "saga", "list", "payments", "--limit", "2")
	var rest admin.Page[admin.Saga]
	d.runCommand(&rest, exitOK, "saga", "list", "payments", "--limit", "2", "--after", page.Next, "--database", d.shop.Name())
	if len(page.Items) != 2 || page.Items[0].ID != "p2" || len(rest.Items) != 1 || rest.Items[0].ID != "p0" {
		t.Errorf("unexpected results %+v and %+v", page, rest)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "saga", "list", "payments"), "p1", "3 of 3 instances")
	var one admin.Saga
	d.runCommand(&one, exitOK, "saga", "show", "payments", "p1")
	if one.Version != 2 || len(one.State) != 0 {
		t.Errorf("unexpected result %+v", one)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "saga", "show", "payments", "p1", "--state"), "version 2", `"total": 1`)
	for _, args := range [][]string{{"show", "payments", "nobody"}, {"show", "unknown", "x"}, {"list", "unknown"}, {"list", "payments", "--limit", "0"}, {"list", "payments", "--database", "elsewhere"}} {
		d.runCommand(nil, exitConfig, append([]string{"saga"}, args...)...)
	}
}

func TestInboxCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	expectTexts(t, d.runCommand(nil, exitOK, "inbox", "counts"), "there is no inbox; searched databases of services: "+d.shop.Name())
	d.runCommand(nil, exitConfig, "inbox", "purge", "--older-than", "72h")
	x, err := mongostore.Open(d.shop, inbox.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	if err := x.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.shop.CreateCollection(t.Context(), "inbox_offsets"); err != nil && !strings.Contains(err.Error(), "NamespaceExists") {
		t.Fatal(err)
	}

	old, now := time.Now().Add(-90*24*time.Hour), time.Now()
	for i, at := range []time.Time{old, old, now} {
		d.insertDocument(d.shop.Collection("inbox"), bson.D{{Key: "_id", Value: fmt.Sprint("m", i)}, {Key: "s", Value: "handled"}, {Key: "at", Value: at}})
	}

	for i, until := range []time.Time{old, now.Add(time.Hour)} {
		d.insertDocument(d.shop.Collection("inbox_claims"), bson.D{{Key: "_id", Value: fmt.Sprint("m", i)}, {Key: "until", Value: until}})
	}

	var counts struct{ Inboxes []admin.InboxCounts }
	d.runCommand(&counts, exitOK, "inbox", "counts")
	if len(counts.Inboxes) != 1 || counts.Inboxes[0].Handled != 3 || counts.Inboxes[0].Claimed != 2 || counts.Inboxes[0].Expired != 1 {
		t.Errorf("unexpected result %+v", counts)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "inbox", "counts"), d.shop.Name(), "inbox")
	expectTexts(t, d.runCommand(nil, exitOK, "inbox", "marks"), "keeps watermarks")
	var purged admin.InboxPurged
	d.runCommand(&purged, exitOK, "inbox", "purge", "--older-than", "720h", "--dry-run")
	if purged.Matched != 2 || purged.Removed != 0 {
		t.Errorf("unexpected result %+v", purged)
	}

	expectTexts(t, d.runCommand(nil, exitConfig, "inbox", "purge", "--older-than", "720h"), "remove 2 marks", "pass --yes")
	d.runCommand(&purged, exitOK, "inbox", "purge", "--older-than", "720h", "--yes")
	if purged.Removed != 2 {
		t.Errorf("unexpected result %+v", purged)
	}

	d.runCommand(nil, exitConfig, "inbox", "purge")
	var released admin.InboxReleased
	d.runCommand(&released, exitOK, "inbox", "release", "--dry-run")
	if released.Matched != 2 || released.Live != 1 {
		t.Errorf("unexpected result %+v", released)
	}

	d.runCommand(nil, exitConfig, "inbox", "release", "--yes")
	d.runCommand(&released, exitOK, "inbox", "release", "--yes", "--force", "--database", d.shop.Name())
	if released.Released != 2 {
		t.Errorf("unexpected result %+v", released)
	}
}
