"""Files of FSDP's ranks: one file for each rank, as verl, SkyRL and Accelerate without DCP save them."""
