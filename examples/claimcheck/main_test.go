package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestALargeDocumentArrivesWhole(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	c := env.Consumer("archive", consumer.WithTopics(env.Topic("outbox.event.document")))
	got := make(chan []byte, 1)
	if _, err := register(c, env.DB, func(_ *consumer.Message, body []byte) { got <- bytes.Clone(body) }); err != nil {
		t.Fatal(err)
	}
	env.Run(c.Run)

	document := bytes.Repeat([]byte("page "), 1<<20)
	if err := send(t.Context(), env.DB, "d-1", document); err != nil {
		t.Fatal(err)
	}
	select {
	case body := <-got:
		if !bytes.Equal(body, document) {
			t.Errorf("document: got %d bytes, want the %d that were sent", len(body), len(document))
		}
	case <-time.After(time.Minute):
		t.Fatal("the document did not arrive")
	}
}
