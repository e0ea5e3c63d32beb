package scaling

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
)

// Measured has the coefficients of the model, and the simulated clusters that it is compared with.
type Measured struct {
	Machine string      `json:"machine"`
	Date    string      `json:"date"`
	Costs   map[Op]Cost `json:"costs"`
	Memory  Memory      `json:"memory"`
	Etcd    EtcdLimit   `json:"etcd"`
	Checks  []Check     `json:"checks"`
}

// EtcdLimit has the highest rates of writes of one etcd with one member and fsync, as a client of etcd.
type EtcdLimit struct {
	Small      float64 `json:"small"`      // writes per second of 300 bytes
	Large      float64 `json:"large"`      // writes per second of 4,096 bytes
	SmallCPU   float64 `json:"smallCPU"`   // CPU time of etcd for one, µs
	LargeCPU   float64 `json:"largeCPU"`   // µs
	FsyncP50   float64 `json:"fsyncP50"`   // upper bound of the bucket of etcd's histogram with the median, ms
	SmallFsync float64 `json:"smallFsync"` // fsyncs for one small write
}

// Check is one simulated cluster: its load, and the rates that its clients reached.
type Check struct {
	Name     string  `json:"name"`
	Cluster  Cluster `json:"cluster"`
	Seconds  float64 `json:"seconds"` // of activity before memory was read
	Rates    Rates   `json:"rates"`   // measured
	Measured Load    `json:"measured"`
}

//go:embed measured.json
var measuredJSON []byte

// Current returns the measurements of measured.json.
func Current() (*Measured, error) { return parse(measuredJSON) }

// Read returns the measurements of a file.
func Read(path string) (*Measured, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parse(data)
}

// Write replaces a file by m.
func (m *Measured) Write(path string) error {
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}

func parse(data []byte) (*Measured, error) {
	m := &Measured{Costs: map[Op]Cost{}}
	if err := json.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("measurements of scaling: %w", err)
	}
	return m, nil
}

// SetCheck adds a check, or replaces the one with its name.
func (m *Measured) SetCheck(c Check) {
	for i := range m.Checks {
		if m.Checks[i].Name == c.Name {
			m.Checks[i] = c
			return
		}
	}
	m.Checks = append(m.Checks, c)
}
