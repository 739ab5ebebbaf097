//go:build unix

package docs

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/test/kit"
)

// names replaces what differs between two runs by the names, ids and times of the page.
type names struct {
	texts *strings.Replacer
	began time.Time
	ids   map[string]string // ids of the run and of the page
	own   string            // namespace of the outbox
}

var (
	pageBegin   = time.Date(2026, 11, 27, 10, 0, 0, 0, time.UTC)
	uuidText    = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	letterID    = regexp.MustCompile(`\bdead-[0-9a-z]{20,}`)
	objectID    = regexp.MustCompile(`\b[0-9a-f]{24}\b`)
	dateText    = regexp.MustCompile(`\b20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z`)
	token       = regexp.MustCompile(`\b82[0-9A-F]{14,}\b`)
	version     = regexp.MustCompile(`\b[0-9]+\.[0-9]+\.[0-9]+-test\.[0-9]+\b`)
	nodeName    = regexp.MustCompile(`\bn[0-9]+-[0-9a-z_]{8}\b`)
	shortRounds = 10 * time.Minute
)

func newNames(s *kit.Scene) *names {
	name := s.DB.Name()
	return &names{
		texts: strings.NewReplacer(digestOf(name+".outbox"), digestOf("shop.outbox"), "\n", `\n`, name+"_state", "outrelay", name+".outbox", "shop.outbox", name+".", "outbox.event.", name, "shop"),
		began: time.Now(), ids: map[string]string{}, own: name + ".outbox",
	}
}

// formatDocument formats a document as mongosh does, with one line for each field.
func (n *names) formatDocument(document bson.Raw) string {
	return n.formatValue(bson.RawValue{Type: bson.TypeEmbeddedDocument, Value: document}, "")
}

// formatRecord formats a record with the parts that a consumer gets.
func (n *names) formatRecord(rec *kit.Record) string {
	var b strings.Builder
	fmt.Fprintf(&b, "{\n  topic: %s, partition: %d, offset: %d,\n", n.quote(rec.Topic), rec.Partition, rec.Offset)
	fmt.Fprintf(&b, "  key: %s,\n  headers: {\n", n.quote(string(rec.Key)))
	for _, h := range rec.Headers {
		fmt.Fprintf(&b, "    %s: %s,\n", n.quote(h.Key), n.formatBytes(h.Value))
	}
	fmt.Fprintf(&b, "  },\n  value: %s,\n}", n.formatBytes(rec.Value))
	return b.String()
}

// widest is the length from which a document takes one line for each field.
const widest = 100

func (n *names) formatValue(v bson.RawValue, indent string) string {
	if v.Type == bson.TypeEmbeddedDocument || v.Type == bson.TypeArray {
		return n.formatFields(v, indent)
	}

	switch v.Type {
	case bson.TypeString:
		return n.quote(v.StringValue())
	case bson.TypeObjectID:
		return `ObjectId("` + n.replaceID(v.ObjectID().Hex()) + `")`
	case bson.TypeDateTime:
		return `ISODate("` + n.roundTime(v.Time()).Format(time.RFC3339) + `")`
	case bson.TypeTimestamp:
		seconds, _ := v.Timestamp()
		return fmt.Sprintf("Timestamp(%d, 1)", n.roundTime(time.Unix(int64(seconds), 0)).Unix())
	case bson.TypeBinary:
		subtype, data := v.Binary()
		if id, err := uuid.FromBytes(data); subtype == bson.TypeBinaryUUID && err == nil {
			return `UUID("` + n.replaceID(id.String()) + `")`
		}
		return "Binary(" + n.formatBytes(data) + ")"
	case bson.TypeBoolean:
		return strconv.FormatBool(v.Boolean())
	case bson.TypeInt32, bson.TypeInt64:
		return n.formatInteger(v.AsInt64())
	case bson.TypeDouble:
		return strconv.FormatFloat(v.Double(), 'g', -1, 64)
	}
	return v.String()
}

// formatInteger formats a number. A large number is a time in milliseconds, or a hash.
func (n *names) formatInteger(number int64) string {
	if at := time.UnixMilli(number); at.After(n.began.Add(-time.Hour)) && at.Before(n.began.Add(24*time.Hour)) {
		return strconv.FormatInt(n.roundTime(at).UnixMilli(), 10)
	}
	if number > math.MaxInt32 || number < math.MinInt32 {
		return "Long(…)"
	}
	return strconv.FormatInt(number, 10)
}

func (n *names) formatFields(v bson.RawValue, indent string) string {
	isArray := v.Type == bson.TypeArray
	elements, err := bson.Raw(v.Value).Elements()
	if err != nil {
		return "invalid: " + err.Error()
	}

	parts := make([]string, len(elements))
	length := len(indent)
	for i, e := range elements {
		parts[i] = n.formatValue(e.Value(), indent+"  ")
		// It is made of names that differ from run to run.
		if e.Key() == "fingerprint" {
			parts[i] = `"53435ae4f320ac7a"`
		}
		if !isArray {
			parts[i] = e.Key() + ": " + parts[i]
		}
		length += len(parts[i]) + 2
	}

	open, end := "{ ", " }"
	if isArray {
		open, end = "[", "]"
	}
	whole := strings.Join(parts, ", ")
	switch {
	case len(parts) == 0:
		return strings.TrimSpace(open) + strings.TrimSpace(end)
	case indent != "" && length <= widest && !strings.Contains(whole, "\n"):
		return open + whole + end
	}
	return strings.TrimSpace(open) + "\n" + indent + "  " + strings.Join(parts, ",\n"+indent+"  ") + "\n" + indent + strings.TrimSpace(end)
}

func (n *names) formatBytes(data []byte) string {
	if hex.EncodeToString(data) == digestOf(n.own) {
		return "0x" + digestOf("shop.outbox")
	}
	// The digest of a position differs from run to run, and may look like a text.
	if len(data) == record.PositionSize {
		return "8 bytes"
	}
	for _, b := range data {
		if b < ' ' || b > '~' {
			return fmt.Sprintf("%d bytes", len(data))
		}
	}
	return n.quote(string(data))
}

// digestOf returns the value of the header outrelay-ns for a collection.
func digestOf(namespace string) string {
	digest := sha256.Sum256([]byte(namespace))
	return hex.EncodeToString(digest[:8])
}

// quote returns a string in quotes, with the names, ids and times of the page.
func (n *names) quote(text string) string {
	text = n.texts.Replace(text)
	for _, ids := range []*regexp.Regexp{uuidText, letterID, objectID} {
		text = ids.ReplaceAllStringFunc(text, n.replaceID)
	}
	text = token.ReplaceAllString(text, "826B04…")
	text = version.ReplaceAllString(text, "0.1.0")
	text = nodeName.ReplaceAllString(text, "relay-1")

	text = dateText.ReplaceAllStringFunc(text, func(date string) string {
		at, err := time.Parse(time.RFC3339Nano, date)
		if err != nil {
			return date
		}
		return n.roundTime(at).Format(time.RFC3339)
	})

	if strings.Contains(text, `"`) {
		return "'" + text + "'"
	}
	return `"` + text + `"`
}

// replaceID returns the id of the page for an id of the run. The same id has the same replacement in each block.
func (n *names) replaceID(id string) string {
	shown, ok := n.ids[id]
	if ok {
		return shown
	}

	number := 1 + len(n.ids)
	switch {
	case uuidText.MatchString(id):
		shown = fmt.Sprintf("019b2f60-7c00-7000-8000-%012d", number)
	case letterID.MatchString(id):
		shown = fmt.Sprintf("dead-01kb7p000000000000000000%02d", number)
	default:
		shown = fmt.Sprintf("6927720c%016d", number)
	}
	n.ids[id] = shown
	return shown
}

// roundTime returns the time on the page: all of a run is at one moment.
func (n *names) roundTime(at time.Time) time.Time {
	return pageBegin.Add(at.Sub(n.began).Round(shortRounds))
}
