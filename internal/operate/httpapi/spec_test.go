package httpapi

import (
	"encoding/json"
	"testing"
)

// document has the parts of the OpenAPI description that the tests read.
type document struct {
	OpenAPI    string                           `json:"openapi"`
	Paths      map[string]map[string]*operation `json:"paths"`
	Components struct {
		Schemas map[string]*shape `json:"schemas"`
	} `json:"components"`
}

type operation struct {
	OperationID string `json:"operationId"`
	Summary     string `json:"summary"`
	Role        string `json:"x-role"`
	Parameters  []struct {
		Name     string `json:"name"`
		In       string `json:"in"`
		Required bool   `json:"required"`
		Schema   *shape `json:"schema"`
	} `json:"parameters"`
	RequestBody *struct {
		Content map[string]struct {
			Schema *shape `json:"schema"`
		} `json:"content"`
	} `json:"requestBody"`
	Responses map[string]json.RawMessage `json:"responses"`
}

type shape struct {
	Ref        string            `json:"$ref"`
	Type       any               `json:"type"` // a name or a list of names
	Format     string            `json:"format"`
	Pattern    string            `json:"pattern"`
	Enum       []any             `json:"enum"`
	Minimum    *float64          `json:"minimum"`
	Maximum    *float64          `json:"maximum"`
	MinLength  *int              `json:"minLength"`
	MaxLength  *int              `json:"maxLength"`
	MinItems   *int              `json:"minItems"`
	Items      *shape            `json:"items"`
	Properties map[string]*shape `json:"properties"`
	Required   []string          `json:"required"`
	Additional json.RawMessage   `json:"additionalProperties"`
}

// kind returns the first type that is not null.
func (s *shape) kind() string {
	switch t := s.Type.(type) {
	case string:
		return t
	case []any:
		for _, one := range t {
			if one != "null" {
				return one.(string)
			}
		}
	}
	return ""
}

func readSpec(t *testing.T) *document {
	t.Helper()
	d := &document{}
	if err := json.Unmarshal(describeAPI(t), d); err != nil {
		t.Fatal(err)
	}
	return d
}
