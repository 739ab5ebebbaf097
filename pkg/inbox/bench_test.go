package inbox_test

import (
	"context"
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// BenchmarkAdmit is a transaction with one write of the handler for each message, without the inbox and with it.
func BenchmarkAdmit(b *testing.B) {
	for _, size := range []int{1, 10, 100} {
		for _, with := range []bool{false, true} {
			b.Run(fmt.Sprintf("batch=%d/inbox=%t", size, with), func(b *testing.B) {
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
				for b.Loop() {
					// One lane, as a consumer runs it.
					list := make([]inbox.Entry, size)
					for i := range list {
						list[i] = placed(fmt.Sprintf("0199d9a5-9c1e-7000-8000-%012d", offset), 0, offset)
						offset++
					}
					err := s.transaction(b.Context(), func(ctx context.Context) error {
						if with {
							if _, err := s.inbox.Admit(ctx, list); err != nil {
								return err
							}
						}
						_, err := effects.InsertMany(ctx, docs)
						return err
					})
					if err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*size), "µs/message")
			})
		}
	}
}
