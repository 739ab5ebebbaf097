//go:build unix

package integration

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// Other writers insert documents with an _id of any type. Each id that a command prints can be copied into a shell as the argument of
// the next command, and names one dead letter there.
func TestIDsOfAnyTypeCanBeCopied(t *testing.T) {
	stacktest.OnlyWith(t, "it runs dozens of commands", "slow")
	t.Parallel()
	s := kit.New(t, kit.Options{})
	s.StartRelay().WaitTookOver()
	ids := bson.A{
		int32(12345), int64(1) << 40, -5, 1.5, true,
		bson.Null{},
		bson.NewDateTimeFromTime(time.UnixMilli(1_700_000_000_000)), bson.NewObjectID(),
		bson.D{{Key: "a", Value: 1}},
		bson.D{{Key: "a", Value: "x  y"}, {Key: "b", Value: "it's $HOME"}},
		bson.Binary{Subtype: 3, Data: []byte("0123456789abcdef")},
		bson.Binary{Data: []byte{1, 2}},
		"two words", "it's", "$HOME", `"quoted"`, "-dash", "*",
	}
	for _, id := range ids {
		// Without an aggregate type, the envelope of each id is dead.
		if _, err := s.Outbox().InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}}); err != nil {
			t.Fatal(err)
		}
	}
	var list string
	stacktest.Eventually(t, "all of them are dead letters", func() bool {
		_, list, _ = s.RunCommand("dead", "list")
		return strings.Count(list, "malformed") == len(ids)
	})

	lines := strings.Split(list, "\n")
	begin, end := strings.Index(lines[0], "ID"), strings.Index(lines[0], "DELIVERY")
	for _, line := range lines[1 : len(ids)+1] {
		printed := strings.TrimSpace(line[begin:end])
		copied, err := exec.Command("sh", "-c", "printf %s "+printed).Output()
		if err != nil {
			t.Fatalf("%s: %v", printed, err)
		}
		id := string(copied)

		if code, out, errOut := s.RunCommand("dead", "show", "--", id); code != 0 || !strings.Contains(out, " "+printed+"\n") {
			t.Errorf("dead show %s: exit code %d\n%s%s", printed, code, out, errOut)
		}
		if code, out, errOut := s.RunCommand("lookup", "--", id); code != 0 || !strings.Contains(out, " "+printed+": dead\n") {
			t.Errorf("lookup %s: exit code %d\n%s%s", printed, code, out, errOut)
		}
		code, out, errOut := s.RunCommand("dead", "requeue", "--yes", "--", id)
		if code != 1 || !strings.Contains(out, "0 dead letters requeued, 1 rejected") || !strings.Contains(out, " "+printed+" delivery 0: ") {
			t.Errorf("dead requeue %s: exit code %d\n%s%s", printed, code, out, errOut)
		}
		var gone struct{ Discarded int }
		code, out, errOut = s.RunCommand("dead", "discard", "--yes", "--json", "--", id)
		if err := json.Unmarshal([]byte(out), &gone); err != nil || code != 0 || gone.Discarded != 1 {
			t.Errorf("dead discard %s: exit code %d, %v\n%s%s", printed, code, err, out, errOut)
		}
	}
}
