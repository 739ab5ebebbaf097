package event_test

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/event"
)

type placed struct {
	Customer string `json:"customer"`
	Cents    int64  `json:"cents,omitempty"`
	Internal string `json:"-"`
}

func TestATypeMakesAndReadsItsEvents(t *testing.T) {
	t.Parallel()
	orderPlaced := event.Type[placed]{Aggregate: "order", Name: "OrderPlaced"}
	e := orderPlaced.New("o-1", placed{Customer: "<c&7>", Internal: "secret"}, event.WithSchemaVersion("2"))
	v, _ := encodeAndParse(t, e)
	if e.Name() != "OrderPlaced" || e.Aggregate() != (event.Aggregate{Type: "order", ID: "o-1"}) || e.Key() != "o-1" || string(v.SchemaVersion) != "2" {
		t.Errorf("%s about %v with key %s", e.Name(), e.Aggregate(), e.Key())
	}

	body, err := e.Payload()
	if err != nil || string(body) != `{"customer":"<c&7>"}` || e.ContentType() != "application/json" {
		t.Errorf("payload %s of type %s, %v", body, e.ContentType(), err)
	}
	back, err := orderPlaced.Decode(t.Context(), body)
	if err != nil || back != (placed{Customer: "<c&7>"}) {
		t.Errorf("decoded %+v, %v", back, err)
	}
	if back, err := orderPlaced.Decode(t.Context(), []byte(`{"customer":5}`)); err == nil || !strings.Contains(err.Error(), "OrderPlaced") || back != (placed{}) {
		t.Errorf("decoded %+v, %v", back, err)
	}

	gone := orderPlaced.Tombstone("o-1")
	if v, _ := encodeAndParse(t, gone); !v.Tombstone() || gone.Name() != "OrderPlaced" || v.ContentType != nil {
		t.Errorf("the tombstone has the payload %s", v.Payload)
	}
}

func TestAPayloadThatCannotBeEncodedIsReportedWithAllOtherProblems(t *testing.T) {
	t.Parallel()
	for label, e := range map[string]event.Event{
		"codec":       event.Type[int]{Aggregate: "order", Codec: codec.Raw("")}.New("", 5),
		"JSON":        event.Type[chan int]{Aggregate: "order"}.New("", make(chan int)),
		"nil":         event.Type[*placed]{Aggregate: "order"}.New("", nil),
		"plain text":  event.Type[string]{Aggregate: "order"}.New("", "payload"),
		"text in any": event.Type[any]{Aggregate: "order"}.New("", "payload"),
	} {
		err := e.Validate()
		invalid, ok := errors.AsType[*event.InvalidError](err)
		if !ok || len(invalid.Problems) != 3 || !strings.HasPrefix(invalid.Problems[0], "payload ") {
			t.Errorf("%s: %v", label, err)
		}
	}

	type text string
	if err := (event.Type[text]{Aggregate: "a", Name: "n", Codec: codec.Raw("text/plain")}).New("1", "payload").Validate(); err != nil {
		t.Errorf("a named type of text: %v", err)
	}
}

// TestSwappedStringsDoNotCompile: the strings of an event have different types or a name at the place
// of the call.
func TestSwappedStringsDoNotCompile(t *testing.T) {
	t.Parallel()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".")
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if name, file, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			exports[name] = file
		}
	}

	fset := token.NewFileSet()
	imp := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	for _, c := range []struct {
		expr     string
		compiles bool
	}{
		{`orderPlaced.New(id, placed{})`, true},
		{`orderPlaced.New(placed{}, id)`, false},
		{`orderPlaced.New(id, id)`, false},
		{`event.New(about, name, event.JSON(1))`, true},
		{`event.New(name, about, event.JSON(1))`, false},
		{`event.New(about, event.JSON(1), name)`, false},
		{`event.New(about, name, id)`, false},
		{`event.New(about, name, []byte(id))`, false},
		{`event.New(name, id, name, id)`, false},
		{`event.New(about, name, event.Bytes("text/plain", []byte(id)))`, true},
		{`event.New(about, name, event.Bytes([]byte(id), "text/plain"))`, false},
		{`event.New(about, name, event.Payload{}, event.WithHeader("a", []byte(id)))`, true},
		{`event.New(about, name, event.Payload{}, event.WithHeader([]byte(id), "a"))`, false},
		{`event.New(about, name, event.Payload{}, event.WithID(5))`, false},
	} {
		src := fmt.Sprintf(`package x

import "github.com/outrelay/outrelay/pkg/event"

type placed struct{}

var (
	orderPlaced = event.Type[placed]{Aggregate: "order", Name: "OrderPlaced"}
	about       = event.Aggregate{Type: "order", ID: "o-1"}
	name, id    = "OrderPlaced", "o-1"

	_ = %s
)
`, c.expr)
		file, err := parser.ParseFile(fset, "x.go", src, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = (&types.Config{Importer: imp}).Check("x", fset, []*ast.File{file}, nil); (err == nil) != c.compiles {
			t.Errorf("%s: %v", c.expr, err)
		}
	}
}

func TestAPayloadSharesNoMemory(t *testing.T) {
	t.Parallel()
	b := []byte("before")
	document := bsonDocument(t)
	e, d := event.New(about, "t", event.Bytes("", b)), event.New(about, "t", event.Document(document))
	want, _ := d.Payload()
	copy(b, "after!")
	clear(document[4 : len(document)-1])

	if got, _ := e.Payload(); string(got) != "before" {
		t.Errorf("payload %s", got)
	}
	if got, err := d.Payload(); err != nil || !bytes.Equal(got, want) {
		t.Errorf("payload %s, %v; want %s", got, err, want)
	}
}
