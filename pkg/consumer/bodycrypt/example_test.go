package bodycrypt_test

import (
	"bytes"
	"context"
	"fmt"
	"log"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/bodycrypt"
	"github.com/outrelay/outrelay/pkg/event"
)

type patient struct {
	Diagnosis string `json:"diagnosis"`
}

var patientAdmitted = event.Type[patient]{Aggregate: "patient", Name: "PatientAdmitted"}

// Only the service that appends and the handler see the payload. In a service, Encrypt is an option of the outbox,
// outbox.WithMiddleware(bodycrypt.Encrypt(keys)), and Decrypt an option of the handler,
// consumer.WithMiddleware(bodycrypt.Decrypt(keys)).
func Example() {
	// The old key is for records that were encrypted before its replacement.
	keys, err := bodycrypt.Static(
		bodycrypt.Key{ID: "2026-11", Bytes: []byte("0123456789abcdef0123456789abcdef")},
		bodycrypt.Key{ID: "2026-10", Bytes: []byte("fedcba9876543210fedcba9876543210")})
	if err != nil {
		log.Fatal(err)
	}

	var stored event.Event
	store := func(_ context.Context, ev event.Event) error { stored = ev; return nil }
	ctx := context.Background()
	if err := bodycrypt.Encrypt(keys)(store)(ctx, patientAdmitted.New("p-1", patient{Diagnosis: "influenza"})); err != nil {
		log.Fatal(err)
	}
	body, err := stored.Payload()
	fmt.Println("readable in the outbox:", bytes.Contains(body, []byte("influenza")), err)

	admit := consumer.For(patientAdmitted, func(_ context.Context, _ *consumer.Message, p patient) error {
		fmt.Println("the handler gets:", p.Diagnosis)
		return nil
	})
	m := &consumer.Message{ID: stored.ID().String(), Name: stored.Name(), Value: body}
	for _, h := range stored.Headers() {
		m.SetHeader(h.Key, h.Value)
	}
	fmt.Println(bodycrypt.Decrypt(keys)(admit.Handle)(ctx, m))
	// Output:
	// readable in the outbox: false <nil>
	// the handler gets: influenza
	// <nil>
}
