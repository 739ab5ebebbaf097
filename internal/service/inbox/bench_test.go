package inbox_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

// BenchmarkAdmit runs a transaction with one write of the handler for each message. It reports
// medians per message, of Admit alone and of the whole transaction with its commit.
func BenchmarkAdmit(b *testing.B) {
	for _, size := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("batch=%d", size), func(b *testing.B) {
			s := setup(b)
			effects := s.db.Collection("effects")
			if err := s.db.CreateCollection(b.Context(), "effects"); err != nil {
				b.Fatal(err)
			}

			docs := make([]any, size)
			for i := range docs {
				docs[i] = bson.D{{Key: "amount", Value: i}}
			}

			var offset int64
			var admits, whole []time.Duration
			for b.Loop() {
				// All entries are in one lane, as in a consumer.
				list := make([]inbox.Entry, size)
				for i := range list {
					list[i] = newEntryAt(fmt.Sprintf("0199d9a5-9c1e-7000-8000-%012d", offset), 0, offset)
					offset++
				}

				begun := time.Now()
				var admit time.Duration
				err := s.transaction(b.Context(), func(ctx context.Context) error {
					begun := time.Now()
					_, err := s.inbox.AdmitNew(ctx, list)
					admit = time.Since(begun)
					if err == nil {
						_, err = effects.InsertMany(ctx, docs)
					}

					return err
				})
				if err != nil {
					b.Fatal(err)
				}

				admits, whole = append(admits, admit), append(whole, time.Since(begun))
			}

			for unit, took := range map[string][]time.Duration{"admit-µs/message": admits, "transaction-µs/message": whole} {
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds())/float64(size), unit)
			}
		})
	}
}
